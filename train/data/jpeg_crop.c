/* Decodes only the rows and columns of a JPEG that a crop needs, and resizes them with antialiasing.
 *
 * The filter is Pillow's bilinear one (a triangle as wide as the scale, horizontal pass first, 8 bits
 * between the passes), so that a crop differs from Pillow's by rounding alone. Whatever is odd (not a
 * JPEG, CMYK, no end marker, broken data, too large) is NOT_HERE: Pillow takes it, and decides as it
 * always does. Built by `python -m train.data.jpeg`; needs libjpeg-turbo 1.5 or later.
 */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

enum { DONE = 0, NOT_HERE = 1 };
enum { MARGIN = 16 }; /* fancy upsampling looks beyond the crop */
enum { BITS = 14 };   /* fixed point of the weights: they fit 16 bits with their sign */
enum { MAX_PIXELS = 178956970 }; /* above 2 * Image.MAX_IMAGE_PIXELS Pillow sees a bomb, and says so */

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf out;
} errors;

typedef struct {
    int low, high;    /* the input pixels that are needed: [low, high) */
    int count;        /* of them for one output pixel: even, the same for all, padded with zeros */
    int *first;       /* the first of these, counted from low */
    int16_t *weights; /* count for each output pixel; none below 0, and their sum is 1 << BITS */
} filter;

/* The level of a weighted sum; half a level is in it already, and no weight can make it negative. */
static inline uint8_t to_level(int32_t sum)
{
    sum >>= BITS;
    return (uint8_t)(sum > 255 ? 255 : sum);
}

#if defined(__x86_64__)
#include <immintrin.h>

/* One row of RGBX pixels, made out pixels wide: two input pixels at a time. */
__attribute__((target("sse4.1"))) static void
shrink_row(const uint8_t *row, const filter *f, int out, uint8_t *to)
{
    const __m128i pairs = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, -1, -1, -1, -1, -1, -1, -1, -1);
    const int16_t *weights = f->weights;
    int count = f->count;
    for (int i = 0; i < out; i++, weights += count) {
        const uint8_t *p = row + 4 * (size_t)f->first[i];
        __m128i sum = _mm_set1_epi32(1 << (BITS - 1));
        for (int j = 0; j < count; j += 2) {
            int32_t two;
            memcpy(&two, weights + j, 4);
            __m128i pixels = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)(p + 4 * j)), pairs);
            sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_cvtepu8_epi16(pixels), _mm_set1_epi32(two)));
        }
        sum = _mm_packs_epi32(_mm_srai_epi32(sum, BITS), sum);
        int32_t pixel = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
        memcpy(to + 4 * (size_t)i, &pixel, 4);
    }
}
#define CAN_RUN __builtin_cpu_supports("sse4.1")
#define FASTEST __attribute__((target_clones("avx2", "default")))
#else
static void shrink_row(const uint8_t *row, const filter *f, int out, uint8_t *to)
{
    const int16_t *weights = f->weights;
    for (int i = 0; i < out; i++, weights += f->count) {
        const uint8_t *p = row + 4 * (size_t)f->first[i];
        for (int c = 0; c < 4; c++) {
            int sum = 1 << (BITS - 1);
            for (int j = 0; j < f->count; j++)
                sum += p[4 * j + c] * weights[j];
            to[4 * (size_t)i + (size_t)c] = to_level(sum);
        }
    }
}
#define CAN_RUN 1
#define FASTEST
#endif

static void leave(j_common_ptr info) { longjmp(((errors *)info->err)->out, 1); }

static void note(j_common_ptr info, int level)
{
    /* Pillow refuses an image that ends too early; libjpeg would paint the rest grey. */
    if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF)
        leave(info);
}

static int has_end_marker(const uint8_t *data, size_t size)
{
    size_t from = size > 4096 ? size - 4096 : 2;
    for (size_t i = size - 1; i > from; i--)
        if (data[i] == 0xD9 && data[i - 1] == 0xFF)
            return 1;
    return 0;
}

static int open_jpeg(struct jpeg_decompress_struct *info, const uint8_t *data, size_t size)
{
    jpeg_create_decompress(info);
    jpeg_mem_src(info, (unsigned char *)data, size);
    jpeg_read_header(info, TRUE);
    if ((uint64_t)info->image_width * info->image_height > MAX_PIXELS)
        return 0;
    J_COLOR_SPACE space = info->jpeg_color_space;
    return space == JCS_YCbCr || space == JCS_GRAYSCALE || space == JCS_RGB;
}

/* The size of an image, when this file can be decoded here. */
int jpeg_crop_size(const uint8_t *data, size_t size, int *width, int *height)
{
    struct jpeg_decompress_struct info;
    errors err;
    if (!CAN_RUN || size < 128 || data[0] != 0xFF || data[1] != 0xD8 || !has_end_marker(data, size))
        return NOT_HERE;
    memset(&info, 0, sizeof info);
    info.err = jpeg_std_error(&err.base);
    err.base.error_exit = leave;
    err.base.emit_message = note;
    volatile int status = NOT_HERE;
    if (!setjmp(err.out) && open_jpeg(&info, data, size)) {
        *width = (int)info.image_width;
        *height = (int)info.image_height;
        status = DONE;
    }
    jpeg_destroy_decompress(&info);
    return status;
}

/* The input pixels of output pixel i: [*first, *last). */
static double cover(int i, double scale, double wide, int in, int *first, int *last)
{
    double centre = (i + 0.5) * scale;
    *first = (int)(centre - wide + 0.5);
    *last = (int)(centre + wide + 0.5);
    if (*first < 0)
        *first = 0;
    if (*last > in)
        *last = in;
    return centre;
}

/* The height of a triangle around centre, at the middle of input pixel j. */
static double triangle(int j, double centre, double wide)
{
    return fmax(0, 1 - fabs((j - centre + 0.5) / wide));
}

/* The weights of input pixels [first, last): the steps of their rounded running sum. So each rounding
 * is made good by the next weight, and their sum is exact. Weights rounded one by one made noise of
 * 2896 x 2896 pixels 1.3 levels brighter at 32 x 32, and turned white to 256, which is 0. */
static void set_weights(int first, int last, double centre, double wide, int16_t *weights)
{
    double sum = 0, so_far = 0;
    for (int j = first; j < last; j++)
        sum += triangle(j, centre, wide);
    long before = 0;
    for (int j = first; j < last; j++) {
        so_far += triangle(j, centre, wide);
        long until = lround(so_far / sum * (1 << BITS));
        weights[j - first] = (int16_t)(until - before);
        before = until;
    }
}

/* Pillow's coefficients for one axis: in pixels are resized to full, of which out from `from` on count. */
static int make_filter(filter *f, int in, int full, int from, int out)
{
    double scale = (double)in / full, wide = scale > 1 ? scale : 1;
    int first, last;
    cover(from, scale, wide, in, &f->low, &last);
    f->count = 0;
    for (int i = 0; i < out; i++) {
        cover(from + i, scale, wide, in, &first, &f->high);
        if (f->high - first > f->count)
            f->count = f->high - first;
    }
    f->count += f->count & 1;
    f->first = malloc(sizeof(int) * (size_t)out);
    f->weights = calloc((size_t)out * (size_t)f->count, sizeof(int16_t));
    if (!f->first || !f->weights)
        return 0;
    for (int i = 0; i < out; i++) {
        double centre = cover(from + i, scale, wide, in, &first, &last);
        f->first[i] = first - f->low;
        set_weights(first, last, centre, wide, f->weights + i * f->count);
    }
    return 1;
}

/* One output row from the rows that its filter covers; RGBX in, RGB out, mirrored when flip is set. */
FASTEST static void
join_rows(const uint8_t *rows, size_t stride, const filter *f, int y, int width, int flip, int32_t *sums,
          uint8_t *to)
{
    int n = 4 * width;
    for (int i = 0; i < n; i++)
        sums[i] = 1 << (BITS - 1);
    for (int j = 0; j < f->count; j++) {
        const uint8_t *row = rows + stride * (size_t)(f->first[y] + j);
        int weight = f->weights[y * f->count + j];
        if (weight == 0)
            continue;
        for (int i = 0; i < n; i++)
            sums[i] += row[i] * weight;
    }
    for (int i = 0; i < width; i++) {
        uint8_t *pixel = to + 3 * (flip ? width - 1 - i : i);
        for (int c = 0; c < 3; c++)
            pixel[c] = to_level(sums[4 * i + c]);
    }
}

/* Decodes the pixels [left, right) of rows [top, bottom), each row shrunk to out RGBX pixels as it comes. */
static void read_rows(struct jpeg_decompress_struct *info, int left, int top, int right, int bottom,
                      const filter *across, int out, uint8_t *line, uint8_t *rows)
{
    info->out_color_space = JCS_EXT_RGBX;
    info->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(info);
    JDIMENSION from = (JDIMENSION)(left > MARGIN ? left - MARGIN : 0);
    JDIMENSION until = (JDIMENSION)(right + MARGIN);
    JDIMENSION wide = (until < info->output_width ? until : info->output_width) - from;
    if (wide < info->output_width)
        jpeg_crop_scanline(info, &from, &wide);
    if (top > MARGIN)
        jpeg_skip_scanlines(info, (JDIMENSION)(top - MARGIN));
    size_t shift = 4 * ((size_t)left - from);
    while ((int)info->output_scanline < bottom) {
        /* libjpeg-turbo writes past the cache into aligned rows, and we read it at once: keep it off. */
        JSAMPROW target = line + 4;
        int y = (int)info->output_scanline;
        jpeg_read_scanlines(info, &target, 1);
        if (y >= top)
            shrink_row(target + shift, across, out, rows + 4 * (size_t)out * (size_t)(y - top));
    }
}

/* The box (left, top, width, height) of the image, resized to full_width x full_height; of that the
 * square of out x out pixels at (from_x, from_y), as RGB, mirrored when flip is set. */
int jpeg_crop_decode(const uint8_t *data, size_t size, int left, int top, int width, int height,
                     int full_width, int full_height, int from_x, int from_y, int out, int flip,
                     uint8_t *pixels)
{
    struct jpeg_decompress_struct info;
    errors err;
    filter across = {0}, down = {0};
    uint8_t *volatile line = NULL, *volatile rows = NULL;
    int32_t *volatile sums = NULL;
    volatile int status = NOT_HERE;
    memset(&info, 0, sizeof info); /* may be destroyed before it is created */
    info.err = jpeg_std_error(&err.base);
    err.base.error_exit = leave;
    err.base.emit_message = note;
    if (make_filter(&across, width, full_width, from_x, out) &&
        make_filter(&down, height, full_height, from_y, out) && !setjmp(err.out) &&
        open_jpeg(&info, data, size) && left >= 0 && top >= 0 &&
        left + width <= (int)info.image_width && top + height <= (int)info.image_height) {
        size_t stride = 4 * (size_t)out, longest = (size_t)info.image_width + MARGIN;
        line = calloc(longest + (size_t)across.count + 1, 4); /* zero weights look beyond the row */
        rows = malloc(stride * (size_t)(down.high - down.low));
        sums = malloc(stride * sizeof(int32_t));
        if (line && rows && sums) {
            read_rows(&info, left + across.low, top + down.low, left + across.high, top + down.high,
                      &across, out, line, rows);
            for (int y = 0; y < out; y++)
                join_rows(rows, stride, &down, y, out, flip, sums, pixels + 3 * (size_t)out * (size_t)y);
            status = DONE;
        }
    }
    jpeg_destroy_decompress(&info);
    free(line), free(rows), free(sums);
    free(across.first), free(across.weights), free(down.first), free(down.weights);
    return status;
}
