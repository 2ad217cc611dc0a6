/* A rectangle of a JPEG, decoded at 1/1, 1/2, 1/4 or 1/8 of its size by libjpeg-turbo, and resized.

   Rows above the rectangle are only entropy-decoded, columns beside it are not transformed,
   rows below it are never read. Whatever is not a clean RGB-able JPEG is left to the caller. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_CROP __builtin_cpu_supports("avx2")
#else
#define HAS_CROP 0
#endif

/* Earlier ones skip rows of progressive and of merged images wrongly (CVE-2020-35538). */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later is needed"
#endif

#define MAX_SCANS 200 /* As in decode.py: each costs a pass over the whole image. */
#define MARGIN 2      /* Columns that upsampling of chroma reads beside the rectangle. */

typedef struct {
  struct jpeg_error_mgr manager; /* First, so that libjpeg's pointer to it is one to the guard. */
  jmp_buf escape;
  struct jpeg_progress_mgr progress;
  int tagged;
} Guard;

static void leave(j_common_ptr info) { longjmp(((Guard *)info->err)->escape, 1); }

/* Warnings (level -1) are counted and end the decoding; they are never printed. */
static void note(j_common_ptr info, int level) {
  if (level < 0) {
    info->err->num_warnings++;
    leave(info);
  }
}

static void silence(j_common_ptr info) { (void)info; }

static void watch_scans(j_common_ptr info) {
  if (((j_decompress_ptr)info)->input_scan_number > MAX_SCANS) leave(info);
}

/* Notes a segment and skips it; saving them, as libjpeg would, takes time quadratic in their number. */
static boolean note_tag(j_decompress_ptr info) {
  struct jpeg_source_mgr *source = info->src;
  if (source->bytes_in_buffer < 2) leave((j_common_ptr)info);
  long length = (source->next_input_byte[0] << 8) + source->next_input_byte[1];
  if (length < 2) leave((j_common_ptr)info);
  ((Guard *)info->err)->tagged = 1;
  source->skip_input_data(info, length);
  return TRUE;
}

static void prepare(struct jpeg_decompress_struct *jpeg, Guard *guard) {
  jpeg->err = jpeg_std_error(&guard->manager);
  guard->manager.error_exit = leave;
  guard->manager.emit_message = note;
  guard->manager.output_message = silence;
  guard->progress.progress_monitor = watch_scans;
  guard->tagged = 0;
}

PyDoc_STRVAR(size_doc,
             "size(data) -> (height, width, tagged) from the header, or None: not a JPEG that decode takes.\n\n"
             "tagged: there is a segment that may say how the image is to be turned (EXIF, XMP).");

static PyObject *size(PyObject *module, PyObject *arguments) {
  (void)module;
  Py_buffer data;
  if (!PyArg_ParseTuple(arguments, "y*", &data)) return NULL;
  struct jpeg_decompress_struct jpeg;
  Guard guard;
  prepare(&jpeg, &guard);
  if (setjmp(guard.escape)) {
    jpeg_destroy_decompress(&jpeg);
    PyBuffer_Release(&data);
    Py_RETURN_NONE;
  }
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, data.buf, (unsigned long)data.len);
  jpeg_set_marker_processor(&jpeg, JPEG_APP0 + 1, note_tag);
  jpeg_read_header(&jpeg, TRUE);
  int height = (int)jpeg.image_height, width = (int)jpeg.image_width;
  /* Chroma of a quarter by a half at reduced size is cropped wrongly before libjpeg-turbo 3. */
  int taken = jpeg.data_precision == 8 && jpeg.max_h_samp_factor * jpeg.max_v_samp_factor <= 4 &&
              (jpeg.jpeg_color_space == JCS_YCbCr || jpeg.jpeg_color_space == JCS_GRAYSCALE ||
               jpeg.jpeg_color_space == JCS_RGB);
  jpeg_destroy_decompress(&jpeg);
  PyBuffer_Release(&data);
  if (!taken) Py_RETURN_NONE;
  return Py_BuildValue("(iiO)", height, width, guard.tagged ? Py_True : Py_False);
}

/* Starts decoding at the top of a rectangle, of which it returns where it starts in a row. */
static int start(struct jpeg_decompress_struct *jpeg, Guard *guard, const Py_buffer *data, J_COLOR_SPACE space,
                 const int box[4], int shrink) {
  int left = box[0], top = box[1], right = box[2], bottom = box[3];
  jpeg_create_decompress(jpeg);
  jpeg->progress = &guard->progress;
  jpeg_mem_src(jpeg, data->buf, (unsigned long)data->len);
  jpeg_read_header(jpeg, TRUE);
  jpeg->out_color_space = space;
  jpeg->scale_num = 1;
  jpeg->scale_denom = (unsigned int)shrink;
  jpeg->do_block_smoothing = FALSE; /* Of unfinished progressive images: it looks beside the rectangle. */
  jpeg_start_decompress(jpeg);
  if (shrink < 1 || jpeg->output_width != (jpeg->image_width + (JDIMENSION)shrink - 1) / (JDIMENSION)shrink)
    leave((j_common_ptr)jpeg); /* A lossless JPEG is not shrunk. */
  if (left < 0 || top < 0 || left >= right || top >= bottom || right > (int)jpeg->output_width ||
      bottom > (int)jpeg->output_height || jpeg->output_components != (space == JCS_RGB ? 3 : 4))
    leave((j_common_ptr)jpeg);

  JDIMENSION first = (JDIMENSION)(left > MARGIN ? left - MARGIN : 0);
  JDIMENSION end = (JDIMENSION)right + MARGIN;
  if (end > jpeg->output_width) end = jpeg->output_width;
  JDIMENSION width = end - first;
  if (width < jpeg->output_width) jpeg_crop_scanline(jpeg, &first, &width);
  if (top > 0) jpeg_skip_scanlines(jpeg, (JDIMENSION)top);
  return left - (int)first;
}

PyDoc_STRVAR(decode_doc,
             "decode(data, left, top, right, bottom, shrink) -> (pixels, width, left) or None.\n\n"
             "The rectangle is in pixels of the image shrunk by 1, 2, 4 or 8. `pixels` are its rows in RGB,\n"
             "`width` pixels each, in which the rectangle starts at `left`. None: not a clean JPEG.");

static PyObject *decode(PyObject *module, PyObject *arguments) {
  (void)module;
  Py_buffer data;
  int box[4], shrink;
  if (!PyArg_ParseTuple(arguments, "y*iiiii", &data, box, box + 1, box + 2, box + 3, &shrink)) return NULL;

  struct jpeg_decompress_struct jpeg;
  Guard guard;
  prepare(&jpeg, &guard);
  PyObject *volatile pixels = NULL;
  PyThreadState *volatile released = NULL;
  if (setjmp(guard.escape)) {
    if (released) PyEval_RestoreThread(released);
    jpeg_destroy_decompress(&jpeg);
    PyBuffer_Release(&data);
    Py_XDECREF(pixels);
    Py_RETURN_NONE;
  }

  released = PyEval_SaveThread();
  int offset = start(&jpeg, &guard, &data, JCS_RGB, box, shrink);
  size_t row_bytes = (size_t)jpeg.output_width * 3;
  PyEval_RestoreThread(released);
  released = NULL;
  pixels = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(row_bytes * (size_t)(box[3] - box[1])));
  if (!pixels) {
    jpeg_destroy_decompress(&jpeg);
    PyBuffer_Release(&data);
    return NULL;
  }
  unsigned char *row = (unsigned char *)PyByteArray_AsString(pixels);
  released = PyEval_SaveThread();
  while (jpeg.output_scanline < (JDIMENSION)box[3]) {
    JSAMPROW rows[1] = {row + row_bytes * (jpeg.output_scanline - (JDIMENSION)box[1])};
    jpeg_read_scanlines(&jpeg, rows, 1);
  }
  int decoded_width = (int)jpeg.output_width;
  jpeg_destroy_decompress(&jpeg);
  PyEval_RestoreThread(released);
  PyBuffer_Release(&data);
  return Py_BuildValue("(Nii)", pixels, decoded_width, offset);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define AVX2 __attribute__((target("avx2")))

/* Bilinear interpolation of rows as they come, so that they stay in the nearest cache: first between
   two rows, into 16 bits, then between columns. Pixels have four bytes, of which the last is idle. */

#define UNIT 128 /* A weight of one. A byte times it fits 16 bits with a sign. */
#define SHIFT 14 /* UNIT * UNIT. */

typedef struct {
  int below;      /* The sample at or before the place. */
  int16_t weight; /* Of the next one. */
} Place;

typedef struct {
  int below[4];       /* Of four neighbours. */
  int16_t weights[32]; /* Of neighbours 0, 2, 1, 3: both weights, for each byte of a pixel. */
} Four;

/* Where sample i of `to` lies among `from`: both have their centres spread evenly over the same length. */
static Place find_place(int i, int from, int to) {
  double at = (i + 0.5) * from / to - 0.5;
  at = at < 0 ? 0 : at > from - 1 ? from - 1 : at;
  return (Place){(int)at, (int16_t)((at - (int)at) * UNIT + 0.5)};
}

static void find_fours(int from, int to, Four *fours) {
  for (int i = 0; i < (to + 3) / 4 * 4; i++) {
    Place place = find_place(i < to ? i : to - 1, from, to);
    fours[i / 4].below[i % 4] = place.below;
    int16_t *weights = fours[i / 4].weights + 16 * (i % 2) + 8 * (i % 4 / 2);
    for (int k = 0; k < 8; k += 2) {
      weights[k] = (int16_t)(UNIT - place.weight);
      weights[k + 1] = place.weight;
    }
  }
}

AVX2 static void blend_rows(const uint8_t *above, const uint8_t *below, int16_t weight, int bytes, int16_t *out) {
  const __m256i w0 = _mm256_set1_epi16((int16_t)(UNIT - weight)), w1 = _mm256_set1_epi16(weight);
  int i = 0;
  for (; i + 16 <= bytes; i += 16) {
    __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(above + i)));
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(below + i)));
    a = _mm256_add_epi16(_mm256_mullo_epi16(a, w0), _mm256_mullo_epi16(b, w1));
    _mm256_storeu_si256((__m256i *)(out + i), a);
  }
  for (; i < bytes; i++) out[i] = (int16_t)(above[i] * (UNIT - weight) + below[i] * weight);
}

/* Two neighbouring pixels, from each of two places. */
AVX2 static __m256i load_pairs(const int16_t *row, int first, int second) {
  __m128i low = _mm_loadu_si128((const __m128i *)(row + 4 * first));
  __m128i high = _mm_loadu_si128((const __m128i *)(row + 4 * second));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

AVX2 static __m256i weigh(__m256i pairs, const int16_t *weights) {
  const __m256i by_byte = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)); /* Each byte beside its neighbour's. */
  __m256i sums = _mm256_madd_epi16(_mm256_shuffle_epi8(pairs, by_byte), _mm256_loadu_si256((const __m256i *)weights));
  return _mm256_srai_epi32(_mm256_add_epi32(sums, _mm256_set1_epi32(1 << (SHIFT - 1))), SHIFT);
}

/* Writes four bytes too many. */
AVX2 static void blend_columns(const int16_t *row, const Four *fours, int count, uint8_t *out) {
  const __m128i strip = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
  for (int i = 0; i < count; i++) {
    const Four *four = fours + i;
    __m256i even = weigh(load_pairs(row, four->below[0], four->below[2]), four->weights);
    __m256i odd = weigh(load_pairs(row, four->below[1], four->below[3]), four->weights + 16);
    __m256i words = _mm256_packs_epi32(even, odd);
    __m128i pixels = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)(out + 12 * i), _mm_shuffle_epi8(pixels, strip));
  }
}

PyDoc_STRVAR(crop_doc,
             "crop(data, left, top, right, bottom, shrink, size, out) -> True, or None: not a clean JPEG.\n\n"
             "The rectangle as in `decode`, resized bilinearly into `out`, RGB bytes [size, size, 3].\n"
             "Only where HAS_CROP: it needs AVX2.");

static PyObject *crop(PyObject *module, PyObject *arguments) {
  (void)module;
  Py_buffer data, out;
  int box[4], shrink, size;
  if (!PyArg_ParseTuple(arguments, "y*iiiiiiw*", &data, box, box + 1, box + 2, box + 3, &shrink, &size, &out))
    return NULL;

  struct jpeg_decompress_struct jpeg;
  Guard guard;
  prepare(&jpeg, &guard);
  char *volatile memory = NULL;
  PyThreadState *released = PyEval_SaveThread();
  if (setjmp(guard.escape)) {
    jpeg_destroy_decompress(&jpeg);
    free(memory);
    PyEval_RestoreThread(released);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    Py_RETURN_NONE;
  }

  int offset = start(&jpeg, &guard, &data, JCS_EXT_RGBX, box, shrink);
  int width = box[2] - box[0], height = box[3] - box[1];
  if (size < 1 || out.len != (Py_ssize_t)size * size * 3) leave((j_common_ptr)&jpeg);
  int count = (size + 3) / 4;
  size_t line_bytes = (size_t)jpeg.output_width * 4, blended_bytes = ((size_t)width + 1) * 4 * sizeof(int16_t);
  memory = malloc((size_t)count * sizeof(Four) + blended_bytes + 2 * line_bytes + (size_t)count * 12 + 4);
  if (!memory) leave((j_common_ptr)&jpeg);
  Four *columns = (Four *)memory;
  int16_t *blended = (int16_t *)(columns + count);
  uint8_t *lines = (uint8_t *)blended + blended_bytes, *row = lines + 2 * line_bytes;
  find_fours(width, size, columns);

  for (int y = 0, read = 0; y < size; y++) {
    Place place = find_place(y, height, size);
    int above = place.below, below = above + 1 < height ? above + 1 : above;
    while (read <= below) { /* Even lines lie in one place, odd ones in the other. */
      JSAMPROW line[1] = {lines + line_bytes * (size_t)(read % 2)};
      read += (int)jpeg_read_scanlines(&jpeg, line, 1);
    }
    blend_rows(lines + line_bytes * (size_t)(above % 2) + 4 * offset,
               lines + line_bytes * (size_t)(below % 2) + 4 * offset, place.weight, 4 * width, blended);
    memcpy(blended + 4 * (size_t)width, blended + 4 * (size_t)(width - 1), 4 * sizeof(int16_t));
    blend_columns(blended, columns, count, row);
    memcpy((uint8_t *)out.buf + (size_t)y * (size_t)size * 3, row, (size_t)size * 3);
  }
  jpeg_destroy_decompress(&jpeg);
  free(memory);
  PyEval_RestoreThread(released);
  PyBuffer_Release(&data);
  PyBuffer_Release(&out);
  Py_RETURN_TRUE;
}
#endif

static PyMethodDef methods[] = {{"size", size, METH_VARARGS, size_doc},
                                {"decode", decode, METH_VARARGS, decode_doc},
#if defined(__x86_64__) && defined(__GNUC__)
                                {"crop", crop, METH_VARARGS, crop_doc},
#endif
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT, .m_name = "_jpeg", .m_methods = methods};

PyMODINIT_FUNC PyInit__jpeg(void) {
  PyObject *module = PyModule_Create(&definition);
  if (module && PyModule_AddIntConstant(module, "HAS_CROP", HAS_CROP != 0) < 0) Py_CLEAR(module);
  return module;
}
