// Linear layers of bytes, for one instruction set: included by forward_tile.h once without VNNI and once with it, with
// BYTES(name), BYTES_TARGET and VNNI defined, which are undefined at the end.

#if VNNI || defined(__aarch64__)
#define AT_ONCE 1  // fours of bytes that are multiplied before their sum is one of 32 bits
#else
#define AT_ONCE 2
#endif
#define INLINE_BYTES static inline __attribute__((always_inline)) BYTES_TARGET

// Adds to each column the products of `fours` × 4 bytes of `a`, unsigned, on Arm signed, and of `b`, signed; `fours` is 1, or
// 2 on x86-64 without VNNI, where products are summed in 16 bits, with saturation: four of them at a time, since an addition
// takes less than the multiplication that makes 32 bits of a sum. Saturation does not occur: of such four, weights of one sign
// add up to at most 128 (packed_weights.py), and 255 · 128 < 2^15.
INLINE_BYTES INTS BYTES(multiply_add)(const int32_t *a, const int32_t *b, int fours, INTS sum) {
#if defined(__aarch64__)
    (void)fours;
    return (INTS)vdotq_s32((int32x4_t)sum, (int8x16_t)vdupq_n_s32(*a), vld1q_s8((const int8_t *)b));
#elif VNNI && WIDTH == 16
    (void)fours;
    return (INTS)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(*a), _mm512_loadu_si512(b));
#elif VNNI
    (void)fours;
    return (INTS)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(*a), _mm256_loadu_si256((const __m256i *)b));
#elif WIDTH == 16
    __m512i sums = _mm512_maddubs_epi16(_mm512_set1_epi32(a[0]), _mm512_loadu_si512(b));
    if (fours == 2)
        sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(_mm512_set1_epi32(a[1]), _mm512_loadu_si512(b + PANEL)));
    return sum + (INTS)_mm512_madd_epi16(sums, _mm512_set1_epi16(1));
#else
    __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi32(a[0]), _mm256_loadu_si256((const __m256i *)b));
    if (fours == 2)
        sums = _mm256_add_epi16(
            sums, _mm256_maddubs_epi16(_mm256_set1_epi32(a[1]), _mm256_loadu_si256((const __m256i *)(b + PANEL))));
    return sum + (INTS)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
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
    int64_t e = 0;
    for (; e + AT_ONCE <= fours; e += AT_ONCE, weights += AT_ONCE * PANEL) {
        for (int i = 0; i < AT_ONCE && row % ROW_TILE == 0; i++) LEVEL(fetch_ahead)(weights + i * PANEL, FETCHED_AHEAD);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++)
                sums[r][c] = BYTES(multiply_add)(x[r] + e, weights + c * WIDTH, AT_ONCE, sums[r][c]);
    }
    for (int r = 0; e < fours && r < rows; r++)  // the last four alone
        for (int c = 0; c < COLUMNS; c++)
            sums[r][c] = BYTES(multiply_add)(x[r] + e, weights + c * WIDTH, 1, sums[r][c]);
#endif
    FLOATS results[MAX_ROWS][COLUMNS];
    for (int r = 0; r < rows; r++) LEVEL(scale_sums)(step, (const char *)x[r], panel * PANEL, sums[r], results[r]);
    LEVEL(finish)(step, group, row, rows, panel * PANEL, results);
}

static BYTES_TARGET void BYTES(linear)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead) {
    IN_BLOCKS(BYTES(multiply_panel), NULL)
}

#undef INLINE_BYTES
#undef AT_ONCE
#undef VNNI
#undef BYTES
#undef BYTES_TARGET
