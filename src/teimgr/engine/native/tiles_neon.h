// Products of matrices on 64-bit Arm (BFMMLA, SMMLA): two rows times two columns at a time, of four numbers of bfloat16 or
// of eight bytes each. Included by forward_tile.h; in panels, elements of 32 bits that follow each other in a column lie
// PANEL elements apart, and one ZIP makes two columns of them.

// Adds the products of elements `e` and, where `next` is not NULL, `e` + 1 of `rows` rows and of a panel, whose elements
// `here` and `next` point to. tiles[p][k] has rows 2p and 2p + 1 of columns 2k and 2k + 1, row by row; the last row of an odd
// number is there twice. `are_bytes`: as int32, else as float32.
INLINE void LEVEL(add_tiles)(
    const uint32_t *here, const uint32_t *next, const uint32_t *const *x, int64_t e, int rows, int are_bytes,
    FLOATS (*tiles)[2 * COLUMNS]) {
    uint32x4_t of_rows[MAX_ROWS / 2];
    for (int p = 0; 2 * p < rows; p++) {
        const uint32_t *one = x[2 * p] + e, *two = x[2 * p + 1 < rows ? 2 * p + 1 : 2 * p] + e;
        if (next != NULL)
            of_rows[p] = vcombine_u32(vld1_u32(one), vld1_u32(two));
        else
            of_rows[p] = (uint32x4_t){*one, 0, *two, 0};
    }
    for (int c = 0; c < COLUMNS; c++) {
        const uint32x4_t first = vld1q_u32(here + c * WIDTH), second = next == NULL ? vdupq_n_u32(0) : vld1q_u32(next + c * WIDTH);
        const uint32x4_t of_columns[2] = {vzip1q_u32(first, second), vzip2q_u32(first, second)};
        for (int p = 0; 2 * p < rows; p++)
            for (int half = 0; half < 2; half++) {
                FLOATS *tile = &tiles[p][2 * c + half];
                if (are_bytes)
                    *tile = (FLOATS)vmmlaq_s32((int32x4_t)*tile, (int8x16_t)of_rows[p], (int8x16_t)of_columns[half]);
                else
                    *tile = (FLOATS)vbfmmlaq_f32(
                        (float32x4_t)*tile, vreinterpretq_bf16_u32(of_rows[p]), vreinterpretq_bf16_u32(of_columns[half]));
            }
    }
}

// Sets sums[r][c] to the products of `rows` rows and a panel of weights, both of `elements` elements; int32 where
// `are_bytes`. `fetches` as in `add_products`.
INLINE void LEVEL(multiply_tiles)(
    const uint32_t *weights, int64_t elements, const uint32_t *const *x, int rows, int fetches, int are_bytes,
    FLOATS (*sums)[COLUMNS]) {
    FLOATS tiles[MAX_ROWS / 2][2 * COLUMNS] = {};
    int64_t e = 0;
    for (; e + 2 <= elements; e += 2, weights += 2 * PANEL) {
        if (fetches) LEVEL(fetch_ahead)(weights, FETCHED_AHEAD), LEVEL(fetch_ahead)(weights + PANEL, FETCHED_AHEAD);
        LEVEL(add_tiles)(weights, weights + PANEL, x, e, rows, are_bytes, tiles);
    }
    if (e < elements) LEVEL(add_tiles)(weights, NULL, x, e, rows, are_bytes, tiles);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) {
            const uint64x2_t low = (uint64x2_t)tiles[r / 2][2 * c], high = (uint64x2_t)tiles[r / 2][2 * c + 1];
            sums[r][c] = (FLOATS)(uint64x2_t){low[r % 2], high[r % 2]};
        }
}
