/* The kernels at one level: LEVEL names the table, the compiler's flags say which instructions there are. Plain loops,
 * which the compiler turns into vectors: every level computes each element by the same operations. */
#include "kernels.h"

#include <string.h>

#define XXH_INLINE_ALL
#include "xxhash.h"

#if defined(__FMA__) || defined(__aarch64__)
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif

/* Targets may be sources: element by element, that carries nothing from one turn of a loop to another. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH _Pragma("GCC ivdep")
#endif

enum { BLOCK = 1024 }; /* Elements that go through several loops while they are in the nearest cache. */

#define SMALLER(a, b) ((a) < (b) ? (a) : (b))

/* Largest magnitude: of the bits without the sign, as which NaN is larger than infinity, and infinity than numbers. */

#define SIZE(BITS, value) (int##BITS##_t)((value) & (UINT##BITS##_MAX >> 1))

#define MAGNITUDE(BITS)                                                                                                \
    static int##BITS##_t most##BITS(const u##BITS *values, size_t count) {                                             \
        int##BITS##_t most = 0;                                                                                        \
        for (size_t i = 0; i < count; i++) {                                                                           \
            int##BITS##_t size = SIZE(BITS, values[i]);                                                                \
            most = size > most ? size : most;                                                                          \
        }                                                                                                              \
        return most;                                                                                                   \
    }

MAGNITUDE(16)
MAGNITUDE(32)
MAGNITUDE(64)

#define COPY(BITS)                                                                                                     \
    static int##BITS##_t copy_most##BITS(u##BITS *target, const u##BITS *source, size_t count) {                       \
        int##BITS##_t most = 0;                                                                                        \
        EACH for (size_t i = 0; i < count; i++) {                                                                      \
            uint##BITS##_t value = source[i];                                                                          \
            int##BITS##_t size = SIZE(BITS, value);                                                                    \
            target[i] = value;                                                                                         \
            most = size > most ? size : most;                                                                          \
        }                                                                                                              \
        return most;                                                                                                   \
    }

COPY(32)
COPY(64)

static double of32(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double of64(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double magnitude_fp16(const void *values, size_t count) {
    int32_t bits = most16(values, count);
    if (bits >= 0x7c00) /* infinity and NaN keep their fraction */
        return of32(0x7f800000 | (bits & 0x3ff) << 13);
    return bits < 0x400 ? bits * 0x1p-24 : of32((bits << 13) + 0x38000000);
}

static double magnitude_bf16(const void *values, size_t count) { return of32((int32_t)most16(values, count) << 16); }
static double magnitude32(const void *values, size_t count) { return of32(most32(values, count)); }
static double magnitude64(const void *values, size_t count) { return of64(most64(values, count)); }

static double copy32(void *target, const void *source, size_t count) {
    return of32(copy_most32(target, source, count));
}

static double copy64(void *target, const void *source, size_t count) {
    return of64(copy_most64(target, source, count));
}

/* See shardline/core/tensor_bytes.py */

enum { FINGERPRINT_STRIDE = 2 << 10, FINGERPRINT_LINE = 64, LINES = 64 };

static uint64_t fingerprint(const void *data, size_t size) {
    const unsigned char *bytes = data;
    unsigned char lines[LINES * FINGERPRINT_LINE];
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    size_t rows = size / FINGERPRINT_STRIDE;
    for (size_t row = 0; row < rows; row += LINES) {
        size_t count = SMALLER((size_t)LINES, rows - row);
        for (size_t i = 0; i < count; i++)
            memcpy(lines + i * FINGERPRINT_LINE, bytes + (row + i) * FINGERPRINT_STRIDE, FINGERPRINT_LINE);
        XXH3_64bits_update(&state, lines, count * FINGERPRINT_LINE);
    }
    XXH3_64bits_update(&state, bytes + rows * FINGERPRINT_STRIDE, size - rows * FINGERPRINT_STRIDE);
    uint64_t found = XXH3_64bits_digest(&state);
    return found ? found : 1;
}

/* Sums in the canonical tree: see shardline/core/reduce.py. A value that is NULL is left out, not added as zeros. */

#define SUM(BITS)                                                                                                      \
    static void add##BITS(f##BITS *out, const f##BITS *a, const f##BITS *b, size_t count) {                            \
        EACH for (size_t i = 0; i < count; i++)                                                                        \
            out[i] = a[i] + b[i];                                                                                      \
    }                                                                                                                  \
    /* One block of the sum: in `room`, or where the only value of this node lies. */                                  \
    static const f##BITS *node##BITS(f##BITS *room, const void *const *values, size_t replicas, size_t at,             \
                                     size_t count) {                                                                   \
        if (replicas == 1)                                                                                             \
            return values[0] ? (const f##BITS *)values[0] + at : NULL;                                                 \
        f##BITS more[BLOCK];                                                                                           \
        size_t left = 1;                                                                                               \
        while (left * 2 < replicas)                                                                                    \
            left *= 2;                                                                                                 \
        const f##BITS *a = node##BITS(room, values, left, at, count);                                                  \
        /* Where the left side's sum is not in it, the room is free for the right side's. */                           \
        const f##BITS *b = node##BITS(a == room ? more : room, values + left, replicas - left, at, count);             \
        if (!a || !b)                                                                                                  \
            return a ? a : b;                                                                                          \
        add##BITS(room, a, b, count);                                                                                  \
        return room;                                                                                                   \
    }                                                                                                                  \
    static void sum##BITS(void *out, const void *const *values, size_t replicas, size_t count) {                       \
        for (size_t at = 0; at < count; at += BLOCK) {                                                                 \
            size_t size = SMALLER((size_t)BLOCK, count - at);                                                          \
            f##BITS *to = (f##BITS *)out + at;                                                                         \
            const f##BITS *found = node##BITS(to, values, replicas, at, size);                                         \
            if (found && found != to)                                                                                  \
                memcpy(to, found, size * sizeof *to);                                                                  \
        }                                                                                                              \
    }

SUM(32)
SUM(64)

/* SGD, in the order of torch's _single_tensor_sgd and with its roundings. */

#if HAS_FMA
#define FUSED32(a, b, c) __builtin_fmaf(a, b, c)
#define FUSED64(a, b, c) __builtin_fma(a, b, c)
#else
#define FUSED32(a, b, c) ((a) * (b) + (c)) /* never asked for: struct kernels says so */
#define FUSED64(a, b, c) ((a) * (b) + (c))
#endif

#define SGD(BITS, REAL)                                                                                                \
    /* out = b + factor * a */                                                                                         \
    static void madd##BITS(f##BITS *out, const f##BITS *a, REAL factor, const f##BITS *b, size_t count, int fused) {   \
        if (fused) {                                                                                                   \
            EACH for (size_t i = 0; i < count; i++)                                                                    \
                out[i] = FUSED##BITS(a[i], factor, b[i]);                                                              \
        } else {                                                                                                       \
            EACH for (size_t i = 0; i < count; i++)                                                                    \
                out[i] = a[i] * factor + b[i];                                                                         \
        }                                                                                                              \
    }                                                                                                                  \
    /* kept = kept * momentum + share * gradient */                                                                    \
    static void gather##BITS(f##BITS *kept, REAL momentum, const f##BITS *gradient, REAL share, size_t count,          \
                             int fused) {                                                                              \
        if (fused) {                                                                                                   \
            EACH for (size_t i = 0; i < count; i++)                                                                    \
                kept[i] = FUSED##BITS(gradient[i], share, kept[i] * momentum);                                         \
        } else {                                                                                                       \
            EACH for (size_t i = 0; i < count; i++)                                                                    \
                kept[i] = gradient[i] * share + kept[i] * momentum;                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    static void sgd##BITS(void *target, const void *source, const void *gradient, void *momentum_buffer,               \
                          size_t count, const struct sgd_step *step) {                                                 \
        f##BITS scratch[BLOCK];                                                                                        \
        for (size_t at = 0; at < count; at += BLOCK) {                                                                 \
            size_t size = SMALLER((size_t)BLOCK, count - at);                                                          \
            const f##BITS *from = (const f##BITS *)source + at, *g = (const f##BITS *)gradient + at;                   \
            if (step->maximize) {                                                                                      \
                EACH for (size_t i = 0; i < size; i++)                                                                 \
                    scratch[i] = -g[i];                                                                                \
                g = scratch;                                                                                           \
            }                                                                                                          \
            if (step->weight_decay != 0) {                                                                             \
                madd##BITS(scratch, from, (REAL)step->weight_decay, g, size, step->fused);                             \
                g = scratch;                                                                                           \
            }                                                                                                          \
            if (momentum_buffer) {                                                                                     \
                f##BITS *kept = (f##BITS *)momentum_buffer + at;                                                       \
                if (step->first)                                                                                       \
                    memcpy(kept, g, size * sizeof *kept);                                                              \
                else                                                                                                   \
                    gather##BITS(kept, (REAL)step->momentum, g, (REAL)step->share, size, step->fused);                 \
                if (step->nesterov) {                                                                                  \
                    madd##BITS(scratch, kept, (REAL)step->momentum, g, size, step->fused);                             \
                    g = scratch;                                                                                       \
                } else                                                                                                 \
                    g = kept;                                                                                          \
            }                                                                                                          \
            madd##BITS((f##BITS *)target + at, g, (REAL)step->rate, from, size, step->fused);                          \
        }                                                                                                              \
    }

SGD(32, float)
SGD(64, double)

/* Casts: to nearest even. NaN stays NaN; torch itself writes one or another. */

static void to_bf16(void *target, const void *source, size_t count) {
    const u32 *from = source;
    u16 *to = target;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = from[i];
        uint32_t rounded = (bits + UINT32_C(0x7fff) + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000) ? UINT32_C(0x7fc0) : rounded);
    }
}

static void from_bf16(void *target, const void *source, size_t count) {
    const u16 *from = source;
    u32 *to = target;
    for (size_t i = 0; i < count; i++)
        to[i] = (uint32_t)from[i] << 16;
}

#define TABLE_(level) kernels_##level
#define TABLE(level) TABLE_(level)

extern const struct kernels TABLE(LEVEL);
const struct kernels TABLE(LEVEL) = {
    .fma = HAS_FMA,
    .magnitude_fp16 = magnitude_fp16,
    .magnitude_bf16 = magnitude_bf16,
    .magnitude32 = magnitude32,
    .magnitude64 = magnitude64,
    .copy32 = copy32,
    .copy64 = copy64,
    .fingerprint = fingerprint,
    .sum32 = sum32,
    .sum64 = sum64,
    .sgd32 = sgd32,
    .sgd64 = sgd64,
    .to_bf16 = to_bf16,
    .from_bf16 = from_bf16,
};
