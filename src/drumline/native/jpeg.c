/* The part of a JPEG that a crop needs, decoded by libjpeg-turbo and resized row by row as it appears.
 *
 * Pixels are those of a full decode: libjpeg smooths chroma over block borders, so a pixel more is decoded on each
 * side than is used. Whatever is unusual is left to Pillow, so that both paths accept the same files and give the
 * same pixels: other colour spaces, any warning of libjpeg's, and files whose coded data does not run clean to its
 * end marker. The last is looked at before rows below the crop are left undecoded: bytes that hold no marker can
 * make libjpeg warn but never fail, and Pillow passes over warnings. */
#include "drumline.h"

#include <string.h>

/* Whether coded data holds nothing but stuffed bytes and restart markers up to its end marker. */
static int runs_clean(const uint8_t *at, const uint8_t *end) {
    while ((at = memchr(at, 0xFF, (size_t)(end - at)))) {
        if (++at == end) return 0;
        if (*at == 0xD9) return 1;
        if (*at == 0xFF) continue;
        if (*at != 0 && (*at < 0xD0 || *at > 0xD7)) return 0;
        at++;
    }
    return 0;
}

/* Whether a file may have the scans that follow the first one, whose coded data begins at `at`. Markers are found as
 * libjpeg finds them; segments are passed over by their lengths. */
static int scans_are_few(const uint8_t *at, const uint8_t *end, int64_t pixels) {
    int scans = 1;
    for (int parts = 0; parts < MAX_PARTS; parts++) {
        uint8_t code = 0;
        while (code < 2 || code == 0xFF || (code >= 0xD0 && code <= 0xD7)) {
            at = memchr(at, 0xFF, (size_t)(end - at));
            if (!at || ++at == end) return 1;
            code = *at;
            if (code != 0xFF) at++;
        }
        if (code == 0xD8 || code == 0xD9) return 1;
        if (code == 0xDA && (++scans > MAX_SCANS || scans * pixels > (int64_t)SCANNED_TIMES * MAX_PIXELS)) return 0;
        if (code >= 0xC0) {
            if (end - at < 2) return 1;
            int segment = at[0] << 8 | at[1];
            if (segment > end - at) return 1;
            at += segment;
        }
    }
    return 0;
}

#ifdef DRUMLINE_JPEG
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf jump;
} Errors;

static void leave(j_common_ptr info) { longjmp(((Errors *)info->err)->jump, 1); }

static void count(j_common_ptr info, int level) {
    if (level < 0) info->err->num_warnings++;
}

static void silent(j_common_ptr info) { (void)info; }

/* Whether a progressive file holds every bit of every coefficient. Where some are missing libjpeg smooths over blocks,
 * not alike in every version, and does not warn. */
static int is_complete(const struct jpeg_decompress_struct *info) {
    for (int component = 0; component < info->num_components; component++)
        for (int i = 0; i < DCTSIZE2; i++)
            if (info->coef_bits[component][i] != 0) return 0;
    return 1;
}

/* Opens a JPEG and moves to the first wanted row. `left` and `right` (of the stored image) become what libjpeg
 * really gives. */
static int open_region(struct jpeg_decompress_struct *info, const uint8_t *data, size_t length, int width, int height,
                       int top, JDIMENSION *left, JDIMENSION *columns) {
    jpeg_create_decompress(info);
    jpeg_mem_src(info, (unsigned char *)data, (unsigned long)length);
    if (jpeg_read_header(info, TRUE) != JPEG_HEADER_OK) return 0;
    if ((int)info->image_width != width || (int)info->image_height != height || info->data_precision != 8) return 0;
    int grey = info->num_components == 1 && info->jpeg_color_space == JCS_GRAYSCALE;
    int colour = info->num_components == 3 &&
                 (info->jpeg_color_space == JCS_YCbCr || info->jpeg_color_space == JCS_RGB);
    if (!grey && !colour) return 0;
    int one_scan = !info->progressive_mode && info->comps_in_scan == info->num_components;
    const uint8_t *coded = info->src->next_input_byte;
    if (one_scan && !runs_clean(coded, data + length)) return 0;
    if (!one_scan && !scans_are_few(coded, data + length, (int64_t)width * height)) return 0;
    info->out_color_space = JCS_EXT_RGBX;
    jpeg_start_decompress(info);
    if (info->progressive_mode && !is_complete(info)) return 0;
    if (*left > 0 || *columns < info->output_width) jpeg_crop_scanline(info, left, columns);
    if (top > 0 && (int)jpeg_skip_scanlines(info, (JDIMENSION)top) != top) return 0;
    return 1;
}

static void set_errors(struct jpeg_decompress_struct *info, Errors *errors) {
    info->err = jpeg_std_error(&errors->base);
    errors->base.error_exit = leave;
    errors->base.emit_message = count;
    errors->base.output_message = silent;
}

/* libjpeg-turbo writes rows around the cache when they are aligned, and reading them back then takes a third of the
 * whole time: so rows are kept off alignment. The room beside a row takes what libjpeg rounds up. */
#define OFF_ALIGNMENT 4
static size_t row_stride(int width) { return ((size_t)width + 64) * 4 / 64 * 64 + 64; }

static uint8_t *row_buffer(Scratch *scratch, size_t stride) {
    uint8_t *memory = scratch_get(scratch, SCRATCH_REGION, 4 * stride + 128);
    return memory ? memory + (64 - (uintptr_t)memory % 64) + OFF_ALIGNMENT : NULL;
}

/* One pixel more would do, were it not for crops of one column: of a row of a single chroma sample libjpeg-turbo
 * smooths nothing where it uses vector units, and reads on without end where it does not. Four leave it three. */
enum { MARGIN = 4 };
static int lowered(int value) { return value > MARGIN ? value - MARGIN : 0; }
static int raised(int value, int most) { return value < most - MARGIN ? value + MARGIN : most; }

int jpeg_window(const uint8_t *data, size_t length, int stored_width, int stored_height, const int32_t *geometry,
                int size, int filter, int version13, uint8_t *out, Scratch *scratch) {
    struct jpeg_decompress_struct info;
    Errors errors;
    Resampler r;
    volatile int result = LEFT_TO_PILLOW;
    if (resampler_start(&r, scratch, geometry, size, size, filter, columns_come_first(version13, geometry)))
        return LEFT_TO_PILLOW;
    int first_x = geometry[LEFT] + r.x.first, end_x = geometry[LEFT] + r.x.end;
    int first_y = geometry[TOP] + r.y.first, end_y = geometry[TOP] + r.y.end;
    JDIMENSION left = (JDIMENSION)lowered(first_x);
    JDIMENSION columns = (JDIMENSION)raised(end_x, stored_width) - left;
    int top = lowered(first_y);
    size_t stride = row_stride(stored_width);
    uint8_t *rows = row_buffer(scratch, stride);
    if (!rows) return LEFT_TO_PILLOW;

    memset(&info, 0, sizeof info);
    set_errors(&info, &errors);
    if (!setjmp(errors.jump) &&
        open_region(&info, data, length, stored_width, stored_height, top, &left, &columns)) {
        for (int y = top; y < end_y;) {
            JSAMPROW pointers[4] = {rows, rows + stride, rows + 2 * stride, rows + 3 * stride};
            int given = (int)jpeg_read_scanlines(&info, pointers, 4);
            if (given == 0) break;
            for (int i = 0; i < given; i++, y++)
                if (y >= first_y && y < end_y)
                    resampler_row(&r, pointers[i] + 4 * ((size_t)first_x - left));
        }
        if (errors.base.num_warnings == 0 && !resampler_finish(&r, out, 3, geometry[MIRROR])) result = DONE;
    }
    jpeg_destroy_decompress(&info);
    return result;
}

/* How often libjpeg warns over a whole file; -1 when it cannot be decoded. */
EXPORT int drum_jpeg_warnings(const uint8_t *data, size_t length) {
    struct jpeg_decompress_struct info;
    Errors errors;
    uint8_t *volatile row = NULL;
    volatile int result = -1;
    memset(&info, 0, sizeof info);
    set_errors(&info, &errors);
    if (!setjmp(errors.jump)) {
        jpeg_create_decompress(&info);
        jpeg_mem_src(&info, (unsigned char *)data, (unsigned long)length);
        if (jpeg_read_header(&info, TRUE) == JPEG_HEADER_OK) {
            jpeg_start_decompress(&info);
            row = malloc((size_t)info.output_width * (size_t)info.output_components);
            while (row && info.output_scanline < info.output_height) {
                JSAMPROW pointer = row;
                jpeg_read_scanlines(&info, &pointer, 1);
            }
            jpeg_finish_decompress(&info);
            if (row) result = (int)errors.base.num_warnings;
        }
    }
    jpeg_destroy_decompress(&info);
    free(row);
    return result;
}

EXPORT int drum_jpeg_version(void) { return LIBJPEG_TURBO_VERSION_NUMBER; }

#else

int jpeg_window(const uint8_t *data, size_t length, int stored_width, int stored_height, const int32_t *geometry,
                int size, int filter, int version13, uint8_t *out, Scratch *scratch) {
    (void)data, (void)length, (void)stored_width, (void)stored_height, (void)geometry;
    (void)size, (void)filter, (void)version13, (void)out, (void)scratch;
    return LEFT_TO_PILLOW;
}

EXPORT int drum_jpeg_warnings(const uint8_t *data, size_t length) {
    (void)data, (void)length;
    return -1;
}

EXPORT int drum_jpeg_version(void) { return 0; }

#endif

/* Whether Photoshop's blocks do not end just before the length of a name, where Pillow reads on. */
static int blocks_are_whole(const uint8_t *body, size_t length) {
    size_t at = 14;
    while (at + 6 <= length && !memcmp(body + at, "8BIM", 4)) {
        at += 6;
        if (at == length) return 0;
        at += 1 + body[at];
        at += at & 1;
        if (at + 4 > length) return 1;
        size_t size = (size_t)body[at] << 24 | body[at + 1] << 16 | body[at + 2] << 8 | body[at + 3];
        if (size > length) return 1;
        at += 4 + size;
        at += at & 1;
    }
    return 1;
}

/* Whether Pillow, which alone reads these segments, may reject the file because of their content. */
static int pillow_minds(uint8_t marker, const uint8_t *body, size_t length) {
#define BEGINS(words) (length >= sizeof(words) - 1 && !memcmp(body, words, sizeof(words) - 1))
    if (marker == 0xE0) return BEGINS("JFIF") && length < 7;
    if (marker == 0xEE) return BEGINS("Adobe") && length < 7;
    if (marker == 0xE2) return BEGINS("MPF\0") || (BEGINS("ICC_PROFILE\0") && length < 14);
    if (marker == 0xED && BEGINS("Photoshop 3.0\0")) return !blocks_are_whole(body, length);
    return 0;
#undef BEGINS
}

/* By the markers alone, up to the first scan. */
int jpeg_size(const uint8_t *data, size_t length, int32_t *stored) {
    size_t at = 2;
    int exif = 0;
    stored[0] = stored[1] = stored[2] = 0;
    if (length < 4 || data[0] != 0xFF || data[1] != 0xD8) return 0;
    for (int parts = 0; at + 4 <= length && parts < MAX_PARTS; parts++) {
        if (data[at] != 0xFF) break;
        uint8_t marker = data[at + 1];
        if (marker == 0xFF) {
            at++;
            continue;
        }
        if (marker == 0xDA && stored[0] > 0) return 1;
        size_t segment = (size_t)data[at + 2] << 8 | data[at + 3];
        if (marker < 0xC0 || (marker >= 0xD0 && marker <= 0xDA) || segment < 2 || at + 2 + segment > length) break;
        if (marker >= 0xC0 && marker <= 0xC2) {
            if (segment < 8 || stored[0] > 0) break;
            stored[0] = data[at + 7] << 8 | data[at + 8], stored[1] = data[at + 5] << 8 | data[at + 6];
            if (stored[0] == 0 || stored[1] == 0) break;
        }
        if (marker == 0xE1) stored[2] = 1; /* EXIF or XMP: Pillow turns by either */
        /* Pillow joins several segments of EXIF, and limits what they may hold. */
        if (marker == 0xE1 && segment >= 8 && !memcmp(data + at + 4, "Exif\0", 6) && exif++) break;
        if (pillow_minds(marker, data + at + 4, segment - 2)) break;
        at += 2 + segment;
    }
    stored[0] = stored[1] = stored[2] = 0;
    return 0;
}

int jpeg_runs_clean(const uint8_t *data, size_t length) {
    size_t at = 2;
    while (at + 4 <= length && data[at] == 0xFF) {
        if (data[at + 1] == 0xFF) {
            at++;
            continue;
        }
        size_t segment = (size_t)data[at + 2] << 8 | data[at + 3];
        if (at + 2 + segment > length) return 0;
        if (data[at + 1] == 0xDA) return runs_clean(data + at + 2 + segment, data + length);
        at += 2 + segment;
    }
    return 0;
}
