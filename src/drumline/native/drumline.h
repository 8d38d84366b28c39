/* What the parts of the native library share. Called from Python through ctypes, so nothing here knows Python and
 * every call runs without the GIL. Functions marked EXPORT are the interface; `native/__init__.py` declares them. */
#ifndef DRUMLINE_H
#define DRUMLINE_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Columns of a geometry row: see data/feed/transform.py. */
enum { LEFT, TOP, RIGHT, BOTTOM, WIDTH, HEIGHT, X, Y, MIRROR, GEOMETRY };

/* What became of a sample. LEFT_TO_PILLOW is no error: Pillow decides, and words the message. */
enum { DONE = 0, LEFT_TO_PILLOW = 1 };

enum { BOX, BILINEAR, BICUBIC, LANCZOS };

/* Outputs [from, to) of an axis of `source` pixels resized to `target`. */
typedef struct {
    int from, to, taps;
    int first, end; /* source pixels that any of them reads: [first, end) */
    int32_t *starts, *counts, *weights;
    /* For vector units: the same weights two by two, the same number of steps for every output. */
    int steps;
    int32_t *begins, *pairs;
} Axis;

/* Buffers of one thread, kept from image to image. */
typedef struct {
    void *memory[8];
    size_t room[8];
} Scratch;

enum { SCRATCH_ROWS, SCRATCH_MID, SCRATCH_REGION, SCRATCH_AXIS_X, SCRATCH_AXIS_Y };

void *scratch_get(Scratch *scratch, int which, size_t bytes); /* NULL when out of memory */
void scratch_trim(Scratch *scratch);
void scratch_free(Scratch *scratch);

int axis_build(Axis *axis, Scratch *scratch, int which, int source, int target, int filter, int from, int to);

/* Takes the rows of a region of 4-byte pixels one after the other and makes the resized window of them. Rows count
 * from `y.first` of the crop, columns from `x.first`: nothing else needs to be decoded. */
typedef struct {
    Axis x, y;
    int columns_first, given;
    Scratch *scratch;
    uint8_t *mid;     /* rows already resampled (rows first), or the region itself (columns first) */
    uint8_t *pending; /* an odd row waits here for its neighbour: rows are resampled in pairs */
} Resampler;

int resampler_start(Resampler *r, Scratch *scratch, const int32_t *geometry, int size_x, int size_y, int filter,
                    int columns_first);
void resampler_row(Resampler *r, const uint8_t *rgbx);
int resampler_finish(Resampler *r, uint8_t *out, int channels, int mirror);

int columns_come_first(int version13, const int32_t *geometry);

/* The limits of data/image/decode.py, which explains them. What exceeds one is left to Python, which rejects it. */
enum { MAX_PIXELS = 89478485, MAX_PARTS = 100000, MAX_SCANS = 100, SCANNED_TIMES = 20 };

/* One JPEG to one window; DONE or LEFT_TO_PILLOW. */
int jpeg_window(const uint8_t *data, size_t length, int stored_width, int stored_height, const int32_t *geometry,
                int size, int filter, int version13, uint8_t *out, Scratch *scratch);
/* Width, height, and whether there is EXIF; 0 when this is no JPEG for us. */
enum { STORED = 3 };
int jpeg_size(const uint8_t *data, size_t length, int32_t *stored);
/* Whether the (only) scan's data holds nothing but stuffed bytes and restart markers up to its end marker. */
int jpeg_runs_clean(const uint8_t *data, size_t length);

#endif
