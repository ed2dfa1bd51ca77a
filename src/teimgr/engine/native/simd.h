// Vectors of one instruction set, for the *_tile.h files that include this one. Before, there are defined
//   LEVEL(name)  the name of a function or type of this set
//   TARGET       the attribute that allows its instructions
//   WIDTH        float32 numbers in a register
//   COLUMNS      registers of neighbouring results that are summed at a time
//   PAIRS        1: products of pairs of bfloat16 numbers with float32 sums (VDPBF16PS, BFDOT); 0: float32 throughout
//   TILES        of attention alone, 1: products of AMX tiles
// and simd_end.h undefines them.

#define FLOATS LEVEL(floats)
#define INTS LEVEL(ints)
#define UINTS LEVEL(uints)
#define PANEL (COLUMNS * WIDTH)
#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float FLOATS __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t INTS __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t UINTS __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));  // for sums that overflow
#if PAIRS
typedef uint32_t LEVEL(element) __attribute__((may_alias));  // two bfloat16 numbers
#else
typedef float LEVEL(element);
#endif
#define ELEMENT LEVEL(element)

INLINE FLOATS LEVEL(broadcast)(float value) { return value - (FLOATS){}; }

// The larger of each pair, `b` where one of them is NaN.
INLINE FLOATS LEVEL(larger)(FLOATS a, FLOATS b) {
#if WIDTH == 16
    return (FLOATS)_mm512_max_ps((__m512)a, (__m512)b);
#elif WIDTH == 8
    return (FLOATS)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const INTS first = a > b;
    return (FLOATS)((first & (INTS)a) | (~first & (INTS)b));
#endif
}

INLINE float LEVEL(sum_of)(FLOATS x) {
#if WIDTH == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i];
    return sum;
#endif
}

INLINE float LEVEL(largest_of)(FLOATS x) {
#if WIDTH == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < WIDTH; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// 2^x for x ≤ 0; 0 where x is far below -126, NaN where it is NaN. Relative error below 4e-6 with PAIRS, which round to
// bfloat16, else 2e-7.
INLINE FLOATS LEVEL(power_of_two)(FLOATS x) {
#if WIDTH == 16
    const FLOATS whole = (FLOATS)_mm512_roundscale_ps((__m512)x, 0);
#else
    const INTS kept = x > -126.f, none = x != x;
    const FLOATS shifted = x + 12582912.f;  // 1.5 × 2^23: the nearest integer is in the low bits
    const FLOATS whole = shifted - 12582912.f;
#endif
    const FLOATS f = x - whole;
#if PAIRS
    FLOATS p = f * 9.570102e-3f + 5.5913652e-2f;
    p = p * f + 2.4022985e-1f;
    p = p * f + 6.9314423e-1f;
#else
    FLOATS p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
#endif
    p = p * f + 1.0f;
#if WIDTH == 16
    return (FLOATS)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const INTS power = (INTS)((UINTS)p + ((UINTS)shifted << 23));
    return (FLOATS)((power & kept) | ((INTS)x & none));
#endif
}

INLINE FLOATS LEVEL(multiply_add)(ELEMENT a, const ELEMENT *b, FLOATS sum) {
#if PAIRS && defined(__aarch64__)
    const bfloat16x8_t numbers = vreinterpretq_bf16_u32(vdupq_n_u32(a));
    return (FLOATS)vbfdotq_f32((float32x4_t)sum, numbers, vreinterpretq_bf16_u32(vld1q_u32((const uint32_t *)b)));
#elif PAIRS
    return (FLOATS)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)_mm512_loadu_si512(b));
#else
    return sum + a * *(const FLOATS *)b;
#endif
}

#if PAIRS
// WIDTH numbers as bfloat16, to the nearest.
INLINE void LEVEL(store_bfloat16)(FLOATS values, uint16_t *to) {
#if defined(__aarch64__)
    vst1_u16(to, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)values)));
#else
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)values));
#endif
}

// WIDTH numbers of bfloat16.
INLINE FLOATS LEVEL(load_bfloat16)(const uint16_t *from) {
#if defined(__aarch64__)
    return (FLOATS)vshll_n_u16(vld1_u16(from), 16);
#else
    return (FLOATS)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#endif
}
#endif
