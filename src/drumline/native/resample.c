/* Pillow's two-pass resize in its own fixed-point arithmetic: weights of 22 bits, each pass rounded to 8 bits.
 * Bit-equal to data/resize.py's `coefficients` and to Pillow; compiled without contraction of a*b+c, which would
 * change weights on machines that fuse. Pixels are 4 bytes wide inside (red, green, blue, unused), so that one pixel
 * is one vector of four sums. */
#include "drumline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FRACTION_BITS 22
#define HALF (1 << (FRACTION_BITS - 1))
#define KEEP_BYTES ((size_t)16 << 20)

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2_VERSION 1
#define WITH_AVX2 __attribute__((target("avx2")))
#endif

/* A weight is 2048 * high + low, so that products of pixels with both halves fit the 16-bit multiply-and-add of
 * vector units; sums of whole numbers are the same in any order. */
#define LOW_BITS 11
#define LOW_MASK ((1 << LOW_BITS) - 1)
#define SLACK 64 /* bytes that vector loads may read beyond a row */

void *scratch_get(Scratch *scratch, int which, size_t bytes) {
    if (scratch->room[which] < bytes) {
        free(scratch->memory[which]);
        scratch->memory[which] = malloc(bytes + SLACK);
        scratch->room[which] = scratch->memory[which] ? bytes : 0;
    }
    return scratch->memory[which];
}

/* A huge image must not leave every thread holding its buffers for good. */
void scratch_trim(Scratch *scratch) {
    for (int i = 0; i < 8; i++)
        if (scratch->room[i] > KEEP_BYTES) {
            free(scratch->memory[i]);
            scratch->memory[i] = NULL;
            scratch->room[i] = 0;
        }
}

void scratch_free(Scratch *scratch) {
    for (int i = 0; i < 8; i++) free(scratch->memory[i]);
    memset(scratch, 0, sizeof *scratch);
}

static double sinc(double x) {
    if (x == 0.0) return 1.0;
    return sin(x * M_PI) / (x * M_PI);
}

static double shape(int filter, double x) {
    const double a = -0.5;
    switch (filter) {
    case BOX: return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case BILINEAR:
        x = fabs(x);
        return x < 1.0 ? 1.0 - x : 0.0;
    case BICUBIC:
        x = fabs(x);
        if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
        return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
    default: return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
    }
}

static const double REACH[] = {0.5, 1.0, 2.0, 3.0};

/* For each two taps: the high halves of both weights in one number, then the low halves. Every output gets as many
 * steps as the longest needs, for a loop of fixed length; where that would reach over the end it begins earlier, with
 * weights of zero. At most one pixel (or row) beyond the end is read, with weight zero. */
static void pair_weights(Axis *axis) {
    for (int i = 0; i < axis->to - axis->from; i++) {
        const int32_t *weights = axis->weights + (size_t)i * axis->taps;
        int32_t *pairs = axis->pairs + (size_t)i * 2 * axis->steps;
        int begin = axis->starts[i], latest = axis->end - 2 * axis->steps;
        if (begin > latest) begin = latest > axis->first ? latest : axis->first;
        int ahead = axis->starts[i] - begin;
        axis->begins[i] = begin;
        for (int tap = -ahead; tap < 2 * axis->steps - ahead; tap += 2, pairs += 2) {
            int32_t one = tap >= 0 && tap < axis->counts[i] ? weights[tap] : 0;
            int32_t two = tap + 1 >= 0 && tap + 1 < axis->counts[i] ? weights[tap + 1] : 0;
            pairs[0] = (int32_t)((uint32_t)(two >> LOW_BITS) << 16 | ((uint32_t)(one >> LOW_BITS) & 0xFFFF));
            pairs[1] = (int32_t)((uint32_t)(two & LOW_MASK) << 16 | (uint32_t)(one & LOW_MASK));
        }
    }
}

/* Pillow's weights; the twin of `coefficients` in data/resize.py, where they are explained. */
int axis_build(Axis *axis, Scratch *scratch, int which, int source, int target, int filter, int from, int to) {
    double scale = (double)source / target, stretch = scale < 1.0 ? 1.0 : scale;
    double support = REACH[filter] * stretch, narrow = 1.0 / stretch;
    int taps = (int)ceil(support) * 2 + 1, outputs = to - from;
    size_t weights = (size_t)outputs * taps, pairs = (size_t)outputs * (taps + 1);
    double *exact = scratch_get(scratch, which,
                                (weights + pairs + 3 * (size_t)outputs) * sizeof(int32_t) + taps * sizeof(double));
    if (!exact) return -1;
    axis->weights = (int32_t *)(exact + taps);
    axis->pairs = axis->weights + weights;
    axis->starts = axis->pairs + pairs;
    axis->counts = axis->starts + outputs;
    axis->begins = axis->counts + outputs;
    axis->from = from, axis->to = to, axis->taps = taps;
    axis->first = source, axis->end = 0, axis->steps = 0;
    for (int i = 0; i < outputs; i++) {
        double centre = (from + i + 0.5) * scale, total = 0.0;
        int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        if (first < 0) first = 0;
        if (end > source) end = source;
        for (int tap = 0; tap < end - first; tap++) {
            exact[tap] = shape(filter, (tap + first - centre + 0.5) * narrow);
            total += exact[tap];
        }
        for (int tap = 0; tap < end - first; tap++) {
            double weight = (total != 0.0 ? exact[tap] / total : exact[tap]) * (1 << FRACTION_BITS);
            axis->weights[(size_t)i * taps + tap] = (int32_t)(weight < 0 ? weight - 0.5 : weight + 0.5);
        }
        axis->starts[i] = first, axis->counts[i] = end - first;
        if (first < axis->first) axis->first = first;
        if (end > axis->end) axis->end = end;
        if ((end - first + 1) / 2 > axis->steps) axis->steps = (end - first + 1) / 2;
    }
    pair_weights(axis);
    return 0;
}

static uint8_t rounded(int32_t sum) {
    sum >>= FRACTION_BITS;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

static void rows_plainly(const Axis *axis, const uint8_t *row, uint8_t *out) {
    for (int i = 0; i < axis->to - axis->from; i++, out += 4) {
        const int32_t *weights = axis->weights + (size_t)i * axis->taps;
        const uint8_t *at = row + 4 * (size_t)(axis->starts[i] - axis->first);
        int32_t sums[4] = {HALF, HALF, HALF, HALF};
        for (int tap = 0; tap < axis->counts[i]; tap++, at += 4)
            for (int channel = 0; channel < 4; channel++) sums[channel] += at[channel] * weights[tap];
        for (int channel = 0; channel < 4; channel++) out[channel] = rounded(sums[channel]);
    }
}

static void columns_plainly(const Axis *axis, int i, const uint8_t *rows, size_t stride, uint8_t *out, size_t bytes) {
    const int32_t *weights = axis->weights + (size_t)i * axis->taps;
    enum { BLOCK = 64 };
    rows += stride * (size_t)(axis->starts[i] - axis->first);
    for (size_t at = 0; at < bytes; at += BLOCK) {
        size_t width = bytes - at < BLOCK ? bytes - at : BLOCK;
        int32_t sums[BLOCK];
        for (size_t j = 0; j < width; j++) sums[j] = HALF;
        const uint8_t *row = rows + at;
        for (int tap = 0; tap < axis->counts[i]; tap++, row += stride)
            for (size_t j = 0; j < width; j++) sums[j] += row[j] * weights[tap];
        for (size_t j = 0; j < width; j++) out[at + j] = rounded(sums[j]);
    }
}

#ifdef HAVE_AVX2_VERSION
/* Two rows side by side in one register, two source pixels a step. */
WITH_AVX2
static void rows_by_avx2(const Axis *axis, const uint8_t *a, const uint8_t *b, uint8_t *out_a, uint8_t *out_b) {
    const __m256i half = _mm256_set1_epi32(HALF);
    /* Two pixels of four bytes become four pairs of 16 bits, a channel's two values beside each other. */
    const __m256i pair = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const int32_t *weights = axis->pairs;
    for (int i = 0; i < axis->to - axis->from; i++) {
        size_t at = 4 * (size_t)(axis->begins[i] - axis->first);
        __m256i high = _mm256_setzero_si256(), low = half;
        for (int step = 0; step < axis->steps; step++, at += 8, weights += 2) {
            __m128i first = _mm_loadl_epi64((const __m128i *)(a + at));
            __m128i second = _mm_loadl_epi64((const __m128i *)(b + at));
            __m256i pixels = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
            pixels = _mm256_shuffle_epi8(pixels, pair);
            high = _mm256_add_epi32(high, _mm256_madd_epi16(pixels, _mm256_set1_epi32(weights[0])));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(pixels, _mm256_set1_epi32(weights[1])));
        }
        __m256i sums = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(high, LOW_BITS), low), FRACTION_BITS);
        sums = _mm256_packs_epi32(sums, sums);
        sums = _mm256_packus_epi16(sums, sums);
        int32_t pixel_a = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
        int32_t pixel_b = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
        memcpy(out_a + 4 * (size_t)i, &pixel_a, 4);
        memcpy(out_b + 4 * (size_t)i, &pixel_b, 4);
    }
}

/* 32 bytes of a row at a time, two rows a step. */
WITH_AVX2
static void columns_by_avx2(const Axis *axis, int i, const uint8_t *rows, size_t stride, uint8_t *out, size_t bytes) {
    const __m256i half = _mm256_set1_epi32(HALF), zero = _mm256_setzero_si256();
    rows += stride * (size_t)(axis->begins[i] - axis->first);
    for (size_t at = 0; at < bytes; at += 32) {
        const int32_t *weights = axis->pairs + (size_t)i * 2 * axis->steps;
        __m256i high[4] = {zero, zero, zero, zero}, low[4] = {half, half, half, half};
        const uint8_t *row = rows + at;
        for (int step = 0; step < axis->steps; step++, row += 2 * stride, weights += 2) {
            __m256i first = _mm256_loadu_si256((const __m256i *)row);
            __m256i second = _mm256_loadu_si256((const __m256i *)(row + stride));
            __m256i near = _mm256_unpacklo_epi8(first, second), far = _mm256_unpackhi_epi8(first, second);
            __m256i parts[4] = {_mm256_unpacklo_epi8(near, zero), _mm256_unpackhi_epi8(near, zero),
                                _mm256_unpacklo_epi8(far, zero), _mm256_unpackhi_epi8(far, zero)};
            __m256i weight_high = _mm256_set1_epi32(weights[0]), weight_low = _mm256_set1_epi32(weights[1]);
            for (int j = 0; j < 4; j++) {
                high[j] = _mm256_add_epi32(high[j], _mm256_madd_epi16(parts[j], weight_high));
                low[j] = _mm256_add_epi32(low[j], _mm256_madd_epi16(parts[j], weight_low));
            }
        }
        __m256i sums[4];
        for (int j = 0; j < 4; j++)
            sums[j] = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(high[j], LOW_BITS), low[j]), FRACTION_BITS);
        __m256i result = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        _mm256_storeu_si256((__m256i *)(out + at), result);
    }
}
#endif

static int has_avx2(void) {
#ifdef HAVE_AVX2_VERSION
    return __builtin_cpu_supports("avx2");
#else
    return 0;
#endif
}

/* Rows `a` and `b`, resampled into `out_a` and `out_b`. */
static void resample_rows(const Axis *axis, const uint8_t *a, const uint8_t *b, uint8_t *out_a, uint8_t *out_b) {
#ifdef HAVE_AVX2_VERSION
    if (has_avx2()) {
        rows_by_avx2(axis, a, b, out_a, out_b);
        return;
    }
#endif
    rows_plainly(axis, a, out_a);
    if (b != a) rows_plainly(axis, b, out_b);
}

/* Output row `i` out of rows below each other, of which the first is the axis's first. */
static void resample_columns(const Axis *axis, int i, const uint8_t *rows, size_t stride, uint8_t *out) {
#ifdef HAVE_AVX2_VERSION
    if (has_avx2()) {
        columns_by_avx2(axis, i, rows, stride, out, stride);
        return;
    }
#endif
    columns_plainly(axis, i, rows, stride, out, stride);
}

static size_t stride_of(int pixels) { return ((size_t)pixels * 4 + 31) / 32 * 32; }

int columns_come_first(int version13, const int32_t *geometry) {
    int shrinks_by = (geometry[BOTTOM] - geometry[TOP]) - geometry[HEIGHT];
    int narrows_by = (geometry[RIGHT] - geometry[LEFT]) - geometry[WIDTH];
    if (!version13) return shrinks_by > 0 && geometry[BOTTOM] - geometry[TOP] > 100 * (geometry[RIGHT] - geometry[LEFT]);
    return shrinks_by > 0 && shrinks_by > 2 * narrows_by;
}

int resampler_start(Resampler *r, Scratch *scratch, const int32_t *geometry, int size_x, int size_y, int filter,
                    int columns_first) {
    memset(r, 0, sizeof *r);
    r->scratch = scratch, r->columns_first = columns_first;
    if (axis_build(&r->x, scratch, SCRATCH_AXIS_X, geometry[RIGHT] - geometry[LEFT], geometry[WIDTH], filter,
                   geometry[X], geometry[X] + size_x) ||
        axis_build(&r->y, scratch, SCRATCH_AXIS_Y, geometry[BOTTOM] - geometry[TOP], geometry[HEIGHT], filter,
                   geometry[Y], geometry[Y] + size_y))
        return -1;
    int columns = columns_first ? r->x.end - r->x.first : size_x;
    r->mid = scratch_get(scratch, SCRATCH_MID, stride_of(columns) * (size_t)(r->y.end - r->y.first + 1));
    r->pending = scratch_get(scratch, SCRATCH_ROWS, stride_of(r->x.end - r->x.first));
    return r->mid && r->pending ? 0 : -1;
}

void resampler_row(Resampler *r, const uint8_t *rgbx) {
    size_t source = 4 * (size_t)(r->x.end - r->x.first), target = stride_of(r->x.to - r->x.from);
    if (r->columns_first)
        memcpy(r->mid + stride_of(r->x.end - r->x.first) * (size_t)r->given, rgbx, source);
    else if (r->given % 2 == 0)
        memcpy(r->pending, rgbx, source);
    else {
        uint8_t *out = r->mid + target * (size_t)(r->given - 1);
        resample_rows(&r->x, r->pending, rgbx, out, out + target);
    }
    r->given++;
}

static void store_row(const uint8_t *rgbx, uint8_t *out, int pixels, int channels, int mirror) {
    const uint8_t *from = rgbx + (mirror ? 4 * (size_t)(pixels - 1) : 0);
    ptrdiff_t step = mirror ? -4 : 4;
    if (channels == 1) {
        for (int i = 0; i < pixels; i++, from += step) out[i] = *from;
        return;
    }
    for (int i = 0; i < pixels - 1; i++, from += step, out += 3) memcpy(out, from, 4);
    memcpy(out, from, 3);
}

int resampler_finish(Resampler *r, uint8_t *out, int channels, int mirror) {
    int columns = r->x.to - r->x.from, rows = r->y.to - r->y.from;
    size_t narrow = stride_of(columns), wide = stride_of(r->x.end - r->x.first);
    if (r->given != r->y.end - r->y.first) return -1;
    if (!r->columns_first && r->given % 2) {
        uint8_t *last = r->mid + narrow * (size_t)(r->given - 1);
        resample_rows(&r->x, r->pending, r->pending, last, last);
    }
    size_t middle = r->columns_first ? wide : narrow;
    uint8_t *line = scratch_get(r->scratch, SCRATCH_ROWS, middle + 2 * narrow);
    if (!line) return -1;
    uint8_t *result = line + middle, *spare = result + narrow;
    for (int i = 0; i < rows; i++) {
        resample_columns(&r->y, i, r->mid, middle, line);
        const uint8_t *finished = line;
        if (r->columns_first) {
            resample_rows(&r->x, line, line, result, spare);
            finished = result;
        }
        store_row(finished, out + (size_t)i * columns * channels, columns, channels, mirror);
    }
    return 0;
}

static void widen_row(const uint8_t *row, uint8_t *rgbx, int pixels, int channels) {
    if (channels == 1) {
        for (int i = 0; i < pixels; i++) rgbx[4 * (size_t)i] = row[i];
        return;
    }
    for (int i = 0; i < pixels - 1; i++, row += 3, rgbx += 4) memcpy(rgbx, row, 4);
    memcpy(rgbx, row, 3);
}

/* A window of a stored image of 1 or 3 channels; `stride` is in bytes, `out` is (size_y, size_x, channels). */
EXPORT int drum_resize(const uint8_t *image, ptrdiff_t stride, int channels, const int32_t *geometry, int size_x,
                       int size_y, int filter, int columns_first, uint8_t *out) {
    Scratch scratch = {{0}, {0}};
    Resampler r;
    int failed = resampler_start(&r, &scratch, geometry, size_x, size_y, filter, columns_first);
    uint8_t *row = failed ? NULL : scratch_get(&scratch, SCRATCH_REGION, 4 * (size_t)(r.x.end - r.x.first));
    if (row) {
        memset(row, 0, 4 * (size_t)(r.x.end - r.x.first));
        const uint8_t *from = image + (geometry[TOP] + r.y.first) * stride + (geometry[LEFT] + r.x.first) * channels;
        for (int y = r.y.first; y < r.y.end; y++, from += stride) {
            widen_row(from, row, r.x.end - r.x.first, channels);
            resampler_row(&r, row);
        }
        failed = resampler_finish(&r, out, channels, geometry[MIRROR]);
    } else
        failed = -1;
    scratch_free(&scratch);
    return failed;
}
