/* Quantization of a slab of rows in one pass: scales, search, rounding, packing, error sums.
 *
 * The arithmetic is that of kernels.py and search.py, bit by bit: a change here needs one there. It must be compiled
 * without contraction (-ffp-contract=off) and without any option that lets sums be reordered. Loops over float
 * arrays are written so that compilers turn them into vector instructions of whatever width the processor has.
 */
#include "numbers.h"

typedef struct {
    int64_t rows, columns;       /* of the slab */
    int64_t group_rows;          /* rows that share a scale */
    int64_t group_columns;       /* columns that share a scale */
    int32_t dtype, kind, search; /* search: 0 for minmax */
    int32_t coarse, fine;        /* candidates in `coarse_factors` and `fine_factors`, or in `steps` */
    float global_scale;          /* NVFP4 */
    float span;                  /* largest magnitude / span = scale */
    float epsilon;               /* the scale where that gives zero */
    float low, high, half_step;  /* stored range; half a step at its upper end */
    float smallest, largest;     /* scales between which there is a search */
    const float *coarse_factors, *fine_factors;
    const int32_t *steps;
} Task;

typedef struct {
    double error, norm;
    int64_t clipped;
} Facts;

/* A group's numbers in float32: `segments` of `width` columns, `stride` apart, with zeros up to whole lanes. */
typedef struct {
    const float *values;
    int64_t segments, width, stride;
} Group;

typedef struct {
    uint32_t stored;
    float value;
} Scale;

#define FOR_CHUNKS(group)                                                      \
    for (int64_t segment = 0; segment < (group).segments; segment++)           \
        for (int64_t from = 0; from < (group).width; from += CHUNK)

INLINE int chunk_length(int64_t width, int64_t from) { return padded(width - from < CHUNK ? width - from : CHUNK); }

/* The largest magnitude, as bits: they order like the numbers, infinity and NaN last. */
INLINE uint32_t largest(Group group) {
    uint32_t most = 0;
    for (int64_t segment = 0; segment < group.segments; segment++)
        for (int64_t i = 0; i < group.width; i++)
            most = larger(most, bits(group.values[segment * group.stride + i]) & MAGNITUDE);
    return most;
}

/* Squared error in units of the scale, with the reciprocal: for choosing among candidates. */
INLINE double rough_error(Group group, float scale, int kind) {
    float inverse = 1.0f / scale, terms[CHUNK];
    double sum = 0;
    FOR_CHUNKS(group) {
        const float *values = group.values + segment * group.stride + from;
        int count = chunk_length(group.width, from);
        for (int i = 0; i < count; i++) {
            float scaled = values[i] * inverse, off = scaled - nearest(scaled, kind);
            terms[i] = off * off;
        }
        sum += ordered_sum(terms, count);
    }
    return sum;
}

INLINE double exact_error(Group group, float scale, int kind) {
    double terms[CHUNK], sum = 0;
    FOR_CHUNKS(group) {
        const float *values = group.values + segment * group.stride + from;
        int count = chunk_length(group.width, from);
        for (int i = 0; i < count; i++) {
            double off = (double)values[i] - (double)nearest(values[i] / scale, kind) * (double)scale;
            terms[i] = off * off;
        }
        sum += ordered_sum_exact(terms, count);
    }
    return sum;
}

/* ---- scales ---- */

INLINE uint32_t dtype_bits(float value, int dtype) {
    if (dtype == F32) return bits(value);
    if (dtype == BF16) return bits(value) >> 16;
    return value < 0x1p-14f ? (uint32_t)(value * 0x1p24f) : (bits(value) >> 13) - (112u << 10);
}

INLINE Scale plain_scale(float value, int dtype) {
    float kept = to_dtype(value, dtype);
    return (Scale){dtype_bits(kept, dtype), kept};
}

INLINE Scale mx_scale(int32_t index) {
    return (Scale){(uint32_t)index, number(index ? (uint32_t)index << 23 : 0x400000u)};
}

INLINE Scale nv_scale(uint32_t index, float global_scale) {
    float value = index < 8 ? (float)index * 0x1p-9f : number((index << 20) + (120u << 23));
    return (Scale){index, value / global_scale};
}

INLINE int32_t mx_top(int dtype) { return dtype == F16 ? 140 : 252; }

INLINE int32_t mx_code(uint32_t pattern, int mantissa, int bias, int32_t lost, int32_t top) {
    int32_t exponent = (int32_t)((pattern + (1u << (mantissa - 2))) >> mantissa);
    int32_t index = exponent - bias + 127 - 2;
    return exponent == 0 ? lost : index < 0 ? 0 : index > top ? top : index;
}

INLINE Scale minmax(const Task *task, float amax, int kind) {
    if (kind == MXFP4) {
        uint32_t pattern = dtype_bits(amax, task->dtype);
        if (task->dtype == F16) return mx_scale(mx_code(pattern, 10, 15, 127, mx_top(F16)));
        return mx_scale(mx_code(pattern, task->dtype == BF16 ? 7 : 23, 127, 0, mx_top(task->dtype)));
    }
    float quotient = to_dtype(amax / task->span, task->dtype);
    if (kind == NVFP4) {
        float local = task->global_scale * quotient;
        local = rounded(local, 3, -6, 448.0f);
        return nv_scale(local == 0.0f ? 0x20 : code(local, local, FLOAT8), task->global_scale);
    }
    return plain_scale(quotient == 0.0f ? task->epsilon : quotient, task->dtype);
}

INLINE Scale search(const Task *task, Group group, float amax, Scale start, int kind) {
    if (!(start.value >= task->smallest && start.value <= task->largest)) return start;
    Scale best = start;
    double least = __builtin_inf(), first = 0;
    float reach = amax / task->span, centre = 1.0f;
    int coded = kind == MXFP4 || kind == NVFP4;
    int32_t base = kind == MXFP4 ? mx_code(bits(amax), 23, 127, 0, mx_top(F32)) : (int32_t)start.stored;
    for (int32_t k = 0; k < task->coarse + task->fine; k++) {
        Scale candidate;
        float factor = 1.0f;
        if (coded) {
            int32_t low = kind == NVFP4, high = kind == NVFP4 ? 126 : mx_top(task->dtype), index = base + task->steps[k];
            index = index < low ? low : index > high ? high : index;
            candidate = kind == MXFP4 ? mx_scale(index) : nv_scale((uint32_t)index, task->global_scale);
        } else {
            factor = k < task->coarse ? task->coarse_factors[k] : centre * task->fine_factors[k - task->coarse];
            candidate = plain_scale(reach * factor, task->dtype);
        }
        double error = rough_error(group, candidate.value, kind);
        if (candidate.stored == start.stored) first = error;
        error *= (double)candidate.value * (double)candidate.value;
        if (error < least) {
            least = error;
            best = candidate;
            if (k < task->coarse) centre = factor;
        }
    }
    if (best.stored == start.stored) return start;
    /* Where 4-bit numbers are off by at least 1/64 each, the reciprocal and the sums in float32 change an error by
     * less than its 256th part, and nothing has to be computed exactly to know who wins. */
    double start_error = first * (double)start.value * (double)start.value;
    if (kind >= INT4 && first * 4096.0 >= (double)group.width && least < start_error * (255.0 / 256.0)) return best;
    return exact_error(group, best.value, kind) < exact_error(group, start.value, kind) ? best : start;
}

INLINE void store_scale(const Task *task, Scale scale, void *scales, int64_t index) {
    int narrow = task->kind == MXFP4 || task->kind == NVFP4;
    if (narrow) ((uint8_t *)scales)[index] = (uint8_t)scale.stored;
    else if (task->dtype == F32) ((uint32_t *)scales)[index] = scale.stored;
    else ((uint16_t *)scales)[index] = (uint16_t)scale.stored;
}

/* ---- numbers ---- */

/* Two codes a byte, the first one low. */
INLINE void pack(const uint8_t *codes, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count / 2; i++) {
        uint16_t pair;
        memcpy(&pair, codes + 2 * i, sizeof pair);
        out[i] = (uint8_t)(pair | pair >> 4);
    }
}

/* Codes of one chunk, and what that costs: summed in float32 in units of the largest scale, or, where squares might
 * overflow or vanish there, in double precision. */
INLINE void emit(const Task *task, const float *values, const float *scales, int count, int kind, int rounding,
                 uint8_t *codes, Facts *facts) {
    float high = task->high + task->half_step, low = task->low - task->half_step, stored[CHUNK];
    uint32_t coarsest = 0, most = 0;
    int32_t clipped = 0;
    for (int i = 0; i < count; i++) {
        float exact = values[i] / scales[i], scaled = to_dtype(exact, rounding);
        stored[i] = nearest(scaled, kind);
        codes[i] = code(stored[i], scaled, kind);
        clipped += (exact > high) | (exact < low);
        coarsest = larger(coarsest, bits(scales[i]));
        most = larger(most, bits(values[i]) & MAGNITUDE);
    }
    facts->clipped += clipped;
    double error = 0, norm = 0;
    float unit = number(coarsest & EXPONENT);
    float top = number(most) / unit;
    if (unit >= 0x1p-100f && unit <= 0x1p100f && top >= 0x1p-20f && top <= 0x1p20f) {
        float inverse = 1.0f / unit, errors[CHUNK], norms[CHUNK]; /* a power of two, exactly */
        for (int i = 0; i < count; i++) {
            float off = (values[i] - stored[i] * scales[i]) * inverse, whole = values[i] * inverse;
            errors[i] = off * off;
            norms[i] = whole * whole;
        }
        double square = (double)unit * (double)unit;
        error = (double)ordered_sum(errors, count) * square;
        norm = (double)ordered_sum(norms, count) * square;
    } else {
        for (int i = 0; i < count; i++) {
            double off = (double)values[i] - (double)stored[i] * (double)scales[i];
            error += off * off;
            norm += (double)values[i] * (double)values[i];
        }
    }
    facts->error += error;
    facts->norm += norm;
}

/* One compiled function for every kind, dtype and usual width, instead of decisions inside of loops. */
INLINE Scale choose(const Task *task, Group group, int kind, uint32_t *most) {
    uint32_t own = largest(group);
    *most = larger(*most, own);
    Scale start = minmax(task, number(own), kind);
    return task->search && own < EXPONENT ? search(task, group, number(own), start, kind) : start;
}

#define CHOOSE(kind, usual)                                                                              \
    static Scale choose_##kind(const Task *task, Group group, uint32_t *most) {                          \
        usual return choose(task, group, kind, most);                                                    \
    }
#define WIDTH(kind, columns)                                                                             \
    if (group.segments == 1 && group.width == columns)                                                   \
        return choose(task, (Group){group.values, 1, columns, columns}, kind, most);
#define WIDEN(dtype)                                                                                     \
    static void widen_##dtype(const void *weight, int64_t start, int64_t count, float *into) {           \
        widen(weight, start, count, dtype, into);                                                        \
    }
#define EMIT(kind, rounding)                                                                             \
    static void emit_##kind##_##rounding(const Task *task, const float *values, const float *scales,     \
                                         int count, uint8_t *codes, Facts *facts) {                      \
        if (count == CHUNK) emit(task, values, scales, CHUNK, kind, rounding, codes, facts);             \
        else emit(task, values, scales, count, kind, rounding, codes, facts);                            \
    }
CHOOSE(FLOAT8, )
CHOOSE(INT8, )
CHOOSE(INT4, WIDTH(INT4, 128) WIDTH(INT4, 32))
CHOOSE(MXFP4, WIDTH(MXFP4, 32))
CHOOSE(NVFP4, WIDTH(NVFP4, 16))
WIDEN(BF16) WIDEN(F16) WIDEN(F32)
EMIT(FLOAT8, BF16) EMIT(FLOAT8, F16) EMIT(FLOAT8, F32)
EMIT(INT8, BF16) EMIT(INT8, F16) EMIT(INT8, F32)
EMIT(INT4, BF16) EMIT(INT4, F16) EMIT(INT4, F32)
EMIT(MXFP4, BF16) EMIT(MXFP4, F16) EMIT(MXFP4, F32)
EMIT(NVFP4, F32)

typedef Scale (*Choose)(const Task *, Group, uint32_t *);
typedef void (*Widen)(const void *, int64_t, int64_t, float *);
typedef void (*Emit)(const Task *, const float *, const float *, int, uint8_t *, Facts *);

static const Choose choosers[] = {choose_FLOAT8, choose_INT8, choose_INT4, choose_MXFP4, choose_NVFP4};
static const Widen wideners[] = {widen_BF16, widen_F16, widen_F32};
static const Emit emitters[][3] = {
    {emit_FLOAT8_BF16, emit_FLOAT8_F16, emit_FLOAT8_F32},
    {emit_INT8_BF16, emit_INT8_F16, emit_INT8_F32},
    {emit_INT4_BF16, emit_INT4_F16, emit_INT4_F32},
    {emit_MXFP4_BF16, emit_MXFP4_F16, emit_MXFP4_F32},
    {emit_NVFP4_F32, emit_NVFP4_F32, emit_NVFP4_F32}, /* divided in float32, whatever the weight is */
};

/* 0: done; 1: the weight holds NaN or infinity; 2: no memory. `sums`: squared error, squared norm, clipped. */
int zaya_quantize(const Task *task, const void *weight, uint8_t *out, void *scales, double *sums) {
    /* A band of rows in float32, filled up with zeros, and the scale of every column in it. */
    int64_t columns = task->columns, stride = padded(columns);
    float *band = aligned_alloc(64, (size_t)((task->group_rows + 1) * stride) * sizeof(float));
    if (!band) return 2;
    float *spread = band + task->group_rows * stride;
    for (int64_t i = 0; i < stride; i++) spread[i] = 1.0f;

    Choose choose_scale = choosers[task->kind];
    Widen widen_row = wideners[task->dtype];
    Emit emit_chunk = emitters[task->kind][task->search ? F32 : task->dtype];
    int packs = task->kind >= INT4;
    int64_t next = 0;
    uint32_t most = 0;
    uint8_t codes[CHUNK];
    Facts facts = {0, 0, 0};
    for (int64_t row = 0; row < task->rows; row += task->group_rows) {
        Group group = {.segments = task->rows - row, .stride = stride};
        if (group.segments > task->group_rows) group.segments = task->group_rows;
        for (int64_t segment = 0; segment < group.segments; segment++) {
            float *into = band + segment * stride;
            widen_row(weight, (row + segment) * columns, columns, into);
            for (int64_t i = columns; i < stride; i++) into[i] = 0.0f;
        }
        for (int64_t column = 0; column < columns; column += task->group_columns) {
            group.values = band + column;
            group.width = columns - column < task->group_columns ? columns - column : task->group_columns;
            Scale scale = choose_scale(task, group, &most);
            store_scale(task, scale, scales, next++);
            for (int64_t i = 0; i < group.width; i++) spread[column + i] = scale.value;
        }
        if (most >= EXPONENT) break;
        group.width = columns;
        FOR_CHUNKS(group) {
            int64_t left = columns - from < CHUNK ? columns - from : CHUNK, place = (row + segment) * columns + from;
            emit_chunk(task, band + segment * stride + from, spread + from, padded(left), codes, &facts);
            if (packs) pack(codes, left, out + place / 2);
            else memcpy(out + place, codes, (size_t)left);
        }
    }
    free(band);
    sums[0] = facts.error;
    sums[1] = facts.norm;
    sums[2] = (double)facts.clipped;
    return most >= EXPONENT;
}

/* The largest magnitude as float32; NaN where there is one. */
float zaya_largest(const void *values, int64_t count, int32_t dtype) {
    uint32_t most = 0;
    if (dtype == F32) {
        for (int64_t i = 0; i < count; i++) most = larger(most, ((const uint32_t *)values)[i] & MAGNITUDE);
        return number(most);
    }
    uint16_t half = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = ((const uint16_t *)values)[i] & 0x7FFF;
        half = magnitude > half ? magnitude : half;
    }
    return widened(&half, 0, dtype);
}
