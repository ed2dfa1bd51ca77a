// What becomes of hidden states: means of texts, rows of length 1, rows that are not numbers. Each row's result depends on
// that row alone, and sums are in one order.

#include <math.h>

#include "library.h"

// Whether `rows` rows of `width` numbers, each `stride` behind the one before, are within `size` numbers.
static int rows_fit(int64_t rows, int64_t stride, int64_t width, int64_t size) {
    if (rows < 0 || rows > INT32_MAX || width < 0 || width > INT32_MAX || stride < 0 || stride > INT32_MAX) return 0;
    return rows == 0 || (rows - 1) * stride + width <= size;
}

void mean_of_rows(const char *rows, int64_t stride, int64_t count, int64_t width, float *out) {
    memset(out, 0, (size_t)width * sizeof *out);
    for (int64_t row = 0; row < count; row++, rows += stride)
        for (int64_t d = 0; d < width; d++) out[d] += ((const float *)rows)[d];
    for (int64_t d = 0; d < width; d++) out[d] /= (float)count;
}

// out[i] = mean of the rows begins[i] to begins[i + 1] of `hidden`, [tokens, width]; a text has one token at least.
// As the others here it returns DONE, or BAD_CALL where a row is outside of what it was given.
int pool_mean(const float *hidden, int64_t tokens, const int32_t *begins, int64_t texts, int64_t width, float *out) {
    if (!rows_fit(tokens, width, width, INT64_MAX) || !rows_fit(texts, width, width, INT64_MAX)) return BAD_CALL;
    for (int64_t i = 0; i < texts; i++)
        if (begins[i] < 0 || begins[i + 1] <= begins[i] || begins[i + 1] > tokens) return BAD_CALL;
    const int64_t stride = width * (int64_t)sizeof *hidden;
    for (int64_t i = 0; i < texts; i++)
        mean_of_rows((const char *)(hidden + begins[i] * width), stride, begins[i + 1] - begins[i], width, out + i * width);
    return DONE;
}

// out[i] = the first `width` numbers of row i, scaled to length 1 in float64; a row of zeros stays as it is.
// `values` has `size` numbers.
int scale_rows(const float *values, int64_t size, int64_t rows, int64_t stride, int64_t width, float *out) {
    if (!rows_fit(rows, stride, width, size)) return BAD_CALL;
    for (int64_t i = 0; i < rows; i++, values += stride, out += width) {
        double sums[4] = {0, 0, 0, 0};
        for (int64_t d = 0; d < width; d++) sums[d % 4] += (double)values[d] * values[d];
        const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]), norm = sum == 0 ? 1 : sqrt(sum);
        for (int64_t d = 0; d < width; d++) out[d] = (float)(values[d] / norm);
    }
    return DONE;
}

int are_finite(const float *values, int64_t count) {
    int good = 1;
    for (int64_t i = 0; i < count; i++) good &= isfinite(values[i]) != 0;
    return good;
}

// finite[i] = whether all numbers of row i, [rows, width], are finite.
int finite_rows(const float *values, int64_t rows, int64_t width, uint8_t *finite) {
    if (!rows_fit(rows, width, width, INT64_MAX)) return BAD_CALL;
    for (int64_t i = 0; i < rows; i++) finite[i] = (uint8_t)are_finite(values + i * width, width);
    return DONE;
}
