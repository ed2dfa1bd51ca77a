// Linear layers of bytes, for one instruction set: included by forward_tile.h once without VNNI and once with it, with
// BYTES(name), BYTES_TARGET and VNNI defined, which are undefined at the end.

#define INLINE_BYTES static inline __attribute__((always_inline)) BYTES_TARGET

// Adds to each column the products of four bytes of `a`, unsigned, on Arm signed, and four of `b`, signed. On x86-64 without
// VNNI two products are summed in 16 bits, with saturation. It does not occur: neighbouring weights of one sign add up to at most 128
// (packed_weights.py), and 255 · 128 < 2^15.
INLINE_BYTES INTS BYTES(multiply_add)(int32_t a, const int32_t *b, INTS sum) {
#if defined(__aarch64__)
    return (INTS)vdotq_s32((int32x4_t)sum, (int8x16_t)vdupq_n_s32(a), vld1q_s8((const int8_t *)b));
#elif VNNI
    return (INTS)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(a), _mm512_loadu_si512(b));
#elif WIDTH == 16
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi32(a), _mm512_loadu_si512(b));
    return sum + (INTS)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(a), _mm256_loadu_si256((const __m256i *)b));
    return sum + (INTS)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

// `rows` rows of bytes times one panel; as `multiply_panel`.
INLINE_BYTES void BYTES(multiply_panel)(
    const struct step *step, const struct group *group, int64_t row, int rows, int64_t panel, const struct part *part) {
    (void)part;
    const int64_t fours = step->inner / 4;
    const int32_t *weights = (const int32_t *)step->weights + panel * fours * PANEL, *x[MAX_ROWS];
    INTS sums[MAX_ROWS][COLUMNS];
    for (int r = 0; r < rows; r++) {
        x[r] = (const int32_t *)LEVEL(row)(group, step->x.slot, row + r);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = (INTS){};
    }
#if PAIRS && defined(__aarch64__)
    FLOATS tiles[MAX_ROWS][COLUMNS];
    if (row % ROW_TILE == 0)
        LEVEL(multiply_tiles)((const uint32_t *)weights, fours, (const uint32_t *const *)x, rows, 1, 1, tiles);
    else
        LEVEL(multiply_tiles)((const uint32_t *)weights, fours, (const uint32_t *const *)x, rows, 0, 1, tiles);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = (INTS)tiles[r][c];
#else
    for (int64_t e = 0; e < fours; e++, weights += PANEL) {
        if (row % ROW_TILE == 0) LEVEL(fetch_ahead)(weights, FETCHED_AHEAD);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = BYTES(multiply_add)(x[r][e], weights + c * WIDTH, sums[r][c]);
    }
#endif
    FLOATS results[MAX_ROWS][COLUMNS];
    for (int r = 0; r < rows; r++) LEVEL(scale_sums)(step, (const char *)x[r], panel * PANEL, sums[r], results[r]);
    LEVEL(finish)(step, group, row, rows, panel * PANEL, results);
}

static BYTES_TARGET void BYTES(linear)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead) {
    IN_BLOCKS(BYTES(multiply_panel))
}

#undef INLINE_BYTES
#undef VNNI
#undef BYTES
#undef BYTES_TARGET
