// What becomes of hidden states: means of texts, rows of length 1, rows that are no numbers. Each row's result depends on
// that row alone, and sums are in one order.

#include <math.h>

#include "library.h"

// out[i] = mean of the rows begins[i] to begins[i + 1] of `hidden`, [tokens, width]; a text has one token at least.
void pool_mean(const float *hidden, const int32_t *begins, int64_t texts, int64_t width, float *out) {
    for (int64_t i = 0; i < texts; i++, out += width) {
        memset(out, 0, (size_t)width * sizeof *out);
        for (int64_t token = begins[i]; token < begins[i + 1]; token++)
            for (int64_t d = 0; d < width; d++) out[d] += hidden[token * width + d];
        const float count = (float)(begins[i + 1] - begins[i]);
        for (int64_t d = 0; d < width; d++) out[d] /= count;
    }
}

// out[i] = the first `width` numbers of row i, scaled to length 1 in float64; a row of zeros stays as it is.
void scale_rows(const float *values, int64_t rows, int64_t stride, int64_t width, float *out) {
    for (int64_t i = 0; i < rows; i++, values += stride, out += width) {
        double sums[4] = {0, 0, 0, 0};
        for (int64_t d = 0; d < width; d++) sums[d % 4] += (double)values[d] * values[d];
        const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]), norm = sum == 0 ? 1 : sqrt(sum);
        for (int64_t d = 0; d < width; d++) out[d] = (float)(values[d] / norm);
    }
}

// finite[i] = whether all numbers of row i, [rows, width], are finite.
void finite_rows(const float *values, int64_t rows, int64_t width, uint8_t *finite) {
    for (int64_t i = 0; i < rows; i++, values += width) {
        int good = 1;
        for (int64_t d = 0; d < width; d++) good &= isfinite(values[d]) != 0;
        finite[i] = (uint8_t)good;
    }
}
