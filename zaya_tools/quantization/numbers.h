/* Numbers as kernels.c handles them: their bits, rounding to every stored type, codes, sums in a fixed order. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored tensors are little endian"
#endif

#define INLINE static inline __attribute__((always_inline))

enum { BF16, F16, F32 };
enum { FLOAT8, INT8, INT4, MXFP4, NVFP4 };
enum { LANES = 16, CHUNK = 128 };

#define EXPONENT 0x7F800000u
#define MAGNITUDE 0x7FFFFFFFu

INLINE uint32_t bits(float value) {
    uint32_t result;
    memcpy(&result, &value, sizeof result);
    return result;
}

INLINE float number(uint32_t pattern) {
    float result;
    memcpy(&result, &pattern, sizeof result);
    return result;
}

INLINE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

INLINE float absolute(float value) { return number(bits(value) & MAGNITUDE); }

INLINE float with_sign(float magnitude, float sign) { return number(bits(magnitude) | (bits(sign) & ~MAGNITUDE)); }

/* A power of two whose unit in the last place is the step of a float type with `mantissa` bits at `value`. */
INLINE uint32_t anchor(float value, int mantissa, int lowest) {
    return larger(bits(value) & EXPONENT, (uint32_t)(lowest + 127) << 23) + ((uint32_t)(23 - mantissa) << 23);
}

/* To the nearest number of a float type that is at most `limit`, ties to even: adding the anchor drops what is below
 * the step. Limits here and below are compared as integers, for which every processor has an instruction. */
INLINE float rounded(float value, int mantissa, int lowest, float limit) {
    float magnitude = number(smaller(bits(value) & MAGNITUDE, bits(limit)));
    float large = number(anchor(magnitude, mantissa, lowest));
    return with_sign((magnitude + large) - large, value);
}

/* To the nearest integer between low and high, ties to even; for magnitudes below 2**22. */
INLINE float to_integer(float value, int32_t low, int32_t high) {
    const float large = 12582912.0f; /* 1.5 * 2**23: what is added to it is a count of the last place */
    int32_t zero = (int32_t)bits(large), place = (int32_t)bits(value + large);
    place = place < zero + low ? zero + low : place;
    place = place > zero + high ? zero + high : place;
    return number((uint32_t)place) - large;
}

INLINE float to_dtype(float value, int dtype) {
    if (dtype == F16) return rounded(value, 10, -14, 65504.0f);
    if (dtype == F32) return value;
    uint32_t pattern = bits(value); /* bfloat16 reaches further than its anchors would */
    return number((pattern + 0x7FFFu + (pattern >> 16 & 1u)) & 0xFFFF0000u);
}

/* The stored number nearest to `value`. */
INLINE float nearest(float value, int kind) {
    switch (kind) {
    case FLOAT8: return rounded(value, 3, -6, 448.0f);
    case INT8: return to_integer(value, -128, 127);
    case INT4: return to_integer(value, -8, 7);
    default: return rounded(value, 1, 0, 6.0f);
    }
}

/* How a stored number is written; `scaled` tells whether a zero has a sign. */
INLINE uint8_t code(float stored, float scaled, int kind) {
    if (kind == INT8) return (uint8_t)(int32_t)stored;
    if (kind == INT4) return (uint8_t)(int32_t)(stored + 8.0f);
    int mantissa = kind == FLOAT8 ? 3 : 1, lowest = kind == FLOAT8 ? -6 : 0;
    uint32_t large = anchor(stored, mantissa, lowest);
    uint32_t exponent = (large >> 23) - (uint32_t)(23 - mantissa) - (uint32_t)(lowest + 127);
    uint32_t index = bits(absolute(stored) + number(large)) - large + (exponent << mantissa);
    if (kind == FLOAT8) return (uint8_t)(index | (bits(stored) >> 31 << 7));
    return (uint8_t)(index | (uint32_t)(scaled < 0.0f) << 3);
}

INLINE float widened(const void *weight, int64_t index, int dtype) {
    if (dtype == F32) return ((const float *)weight)[index];
    uint32_t half = ((const uint16_t *)weight)[index];
    if (dtype == BF16) return number(half << 16);
    uint32_t magnitude = (half & 0x7FFF) << 13;
    uint32_t finite = bits(number(magnitude) * 0x1p112f);
    uint32_t result = magnitude >= 0x0F800000u ? magnitude | EXPONENT : finite;
    return number(result | (half & 0x8000) << 16);
}

INLINE void widen(const void *weight, int64_t start, int64_t count, int dtype, float *into) {
    for (int64_t i = 0; i < count; i++) into[i] = widened(weight, start + i, dtype);
}

/* Sum of `count` terms, a multiple of LANES: lanes first, then their halves. */
#define ORDERED_SUM(type, name)                                                                          \
    typedef type name##_16 __attribute__((vector_size(16 * sizeof(type)), aligned(sizeof(type))));       \
    typedef type name##_8 __attribute__((vector_size(8 * sizeof(type)), aligned(sizeof(type))));         \
    typedef type name##_4 __attribute__((vector_size(4 * sizeof(type)), aligned(sizeof(type))));         \
    INLINE type name(const type *terms, int count) {                                                     \
        name##_16 lanes;                                                                                 \
        memcpy(&lanes, terms, sizeof lanes);                                                             \
        for (int i = LANES; i < count; i += LANES) {                                                     \
            name##_16 more;                                                                              \
            memcpy(&more, terms + i, sizeof more);                                                       \
            lanes += more;                                                                               \
        }                                                                                                \
        name##_8 eight[2];                                                                               \
        memcpy(eight, &lanes, sizeof eight);                                                             \
        eight[0] += eight[1];                                                                            \
        name##_4 four[2];                                                                                \
        memcpy(four, eight, sizeof four);                                                                \
        four[0] += four[1];                                                                              \
        return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);                                    \
    }
ORDERED_SUM(float, ordered_sum)
ORDERED_SUM(double, ordered_sum_exact)

INLINE int padded(int64_t count) { return (int)((count + LANES - 1) / LANES * LANES); }
