/* The kernels at one level: LEVEL names the table, the compiler's flags say which instructions there are. Plain loops,
 * which the compiler turns into vectors: every level computes each element by the same operations. */
#include "kernels.h"

#include <float.h>
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

#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))

enum { BLOCK = 1024, PIECE = 128 }; /* Elements that go through several loops while they are in the nearest cache. */

#if defined(__SSE2__)
#include <emmintrin.h>

/* Writes past the cache, which need not be read into it first: for what is not read again before others fill it. In
 * short pieces, because the memory reads nothing meanwhile. */
static void put_away(void *target, const void *source, size_t size) {
    unsigned char *to = target;
    const unsigned char *from = source;
    size_t head = -(uintptr_t)to % sizeof(__m128i), at = SMALLER(head, size);
    memcpy(to, from, at);
    for (; at + sizeof(__m128i) <= size; at += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    memcpy(to + at, from + at, size - at);
}
/* Other threads see what is put away after what was written before this, and before what is written after this. */
static void keep_order(void) { _mm_sfence(); }
#else
#define put_away(target, source, size) memcpy(target, source, size)
#define keep_order() ((void)0)
#endif

/* Largest magnitude: of the bits without the sign, as which NaN is larger than infinity, and infinity than numbers. */

#define SIZE(BITS, value) (int##BITS##_t)((value) & (UINT##BITS##_MAX >> 1))

/* Four quarters side by side: memory gives several streams more than one. */
#define MAGNITUDE(BITS)                                                                                                \
    static int##BITS##_t most##BITS(const u##BITS *values, size_t count) {                                             \
        int##BITS##_t most = 0;                                                                                        \
        size_t part = count / 4;                                                                                       \
        const u##BITS *b = values + part, *c = b + part, *d = c + part, *rest = d + part;                              \
        for (size_t i = 0; i < part; i++) {                                                                            \
            int##BITS##_t one = LARGER(SIZE(BITS, values[i]), SIZE(BITS, b[i]));                                       \
            int##BITS##_t other = LARGER(SIZE(BITS, c[i]), SIZE(BITS, d[i]));                                          \
            most = LARGER(most, LARGER(one, other));                                                                   \
        }                                                                                                              \
        for (size_t i = 0; i < count % 4; i++)                                                                         \
            most = LARGER(most, SIZE(BITS, rest[i]));                                                                  \
        return most;                                                                                                   \
    }

MAGNITUDE(16)
MAGNITUDE(32)
MAGNITUDE(64)

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

#define COPIES(BITS)                                                                                                   \
    static int##BITS##_t copy##BITS(u##BITS *target, const u##BITS *source, size_t count) {                            \
        int##BITS##_t most = 0;                                                                                        \
        EACH for (size_t i = 0; i < count; i++) {                                                                      \
            uint##BITS##_t value = source[i];                                                                          \
            int##BITS##_t size = SIZE(BITS, value);                                                                    \
            target[i] = value;                                                                                         \
            most = LARGER(most, size);                                                                                 \
        }                                                                                                              \
        return most;                                                                                                   \
    }                                                                                                                  \
    static double copies##BITS(void *const *targets, const void *const *sources, const size_t *counts, size_t parts,   \
                               int away) {                                                                             \
        int##BITS##_t most = 0;                                                                                        \
        keep_order();                                                                                                  \
        for (size_t part = 0; part < parts; part++)                                                                    \
            for (size_t at = 0, step = away ? PIECE : counts[part]; at < counts[part]; at += step) {                   \
                u##BITS *target = (u##BITS *)targets[part] + at;                                                       \
                const u##BITS *source = (const u##BITS *)sources[part] + at;                                           \
                size_t count = SMALLER(step, counts[part] - at);                                                       \
                int##BITS##_t size = away ? most##BITS(source, count) : copy##BITS(target, source, count);             \
                most = LARGER(most, size);                                                                             \
                if (away)                                                                                              \
                    put_away(target, source, count * sizeof *target);                                                  \
            }                                                                                                          \
        keep_order();                                                                                                  \
        return of##BITS(most);                                                                                         \
    }

COPIES(32)
COPIES(64)

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

static void digest_begin(void *state) { XXH3_64bits_reset(state); }
static void digest_more(void *state, const void *data, size_t size) { XXH3_64bits_update(state, data, size); }

static uint64_t digest_end(const void *state) {
    uint64_t found = XXH3_64bits_digest(state);
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
    /* The gradient with its sign turned, where a step is to go up, and with the weights' decay. */                    \
    static const f##BITS *wanted##BITS(f##BITS *scratch, const f##BITS *g, const f##BITS *from, REAL decay,            \
                                       size_t count, int maximize, int fused) {                                        \
        if (maximize) {                                                                                                \
            EACH for (size_t i = 0; i < count; i++)                                                                    \
                scratch[i] = -g[i];                                                                                    \
            g = scratch;                                                                                               \
        }                                                                                                              \
        if (decay != 0) {                                                                                              \
            madd##BITS(scratch, from, decay, g, count, fused);                                                         \
            g = scratch;                                                                                               \
        }                                                                                                              \
        return g;                                                                                                      \
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
        keep_order();                                                                                                  \
        for (size_t at = 0, block = step->away ? PIECE : BLOCK; at < count; at += block) {                             \
            size_t size = SMALLER(block, count - at);                                                                  \
            const f##BITS *from = (const f##BITS *)source + at;                                                        \
            const f##BITS *g = wanted##BITS(scratch, (const f##BITS *)gradient + at, from, (REAL)step->weight_decay,   \
                                            size, step->maximize, step->fused);                                        \
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
            f##BITS *to = (f##BITS *)target + at;                                                                      \
            madd##BITS(step->away ? scratch : to, g, (REAL)step->rate, from, size, step->fused);                       \
            if (step->away)                                                                                            \
                put_away(to, scratch, size * sizeof *to);                                                              \
        }                                                                                                              \
        keep_order();                                                                                                  \
    }

SGD(32, float)
SGD(64, double)

/* Adam and AdamW, in the order of torch's _single_tensor_adam and with its roundings. Between the two halves torch takes
 * the roots: MKL's are not rounded like the processor's. */

#define ADAM(BITS, REAL)                                                                                               \
    static void moments##BITS(void *mean, void *square, void *most, const void *source, const void *gradient,          \
                              size_t count, const struct adam_step *step) {                                            \
        REAL share = (REAL)step->share, beta2 = (REAL)step->beta2, rest = (REAL)step->rest;                            \
        /* torch.lerp goes from the nearer end. */                                                                     \
        int near = share < (REAL)0.5 && share > (REAL)-0.5;                                                            \
        REAL weight = near ? share : share - 1;                                                                        \
        f##BITS scratch[BLOCK];                                                                                        \
        for (size_t at = 0; at < count; at += BLOCK) {                                                                 \
            size_t size = SMALLER(BLOCK, count - at);                                                                  \
            const f##BITS *from = (const f##BITS *)source + at;                                                        \
            f##BITS *m = (f##BITS *)mean + at, *v = (f##BITS *)square + at;                                            \
            const f##BITS *g = wanted##BITS(scratch, (const f##BITS *)gradient + at, from, (REAL)step->weight_decay,   \
                                            size, step->maximize, step->fused);                                        \
            if (step->fused) {                                                                                         \
                EACH for (size_t i = 0; i < size; i++) {                                                               \
                    m[i] = FUSED##BITS(weight, g[i] - m[i], near ? m[i] : g[i]);                                       \
                    v[i] = FUSED##BITS(rest * g[i], g[i], v[i] * beta2);                                               \
                }                                                                                                      \
            } else {                                                                                                   \
                EACH for (size_t i = 0; i < size; i++) {                                                               \
                    m[i] = weight * (g[i] - m[i]) + (near ? m[i] : g[i]);                                              \
                    v[i] = rest * g[i] * g[i] + v[i] * beta2;                                                          \
                }                                                                                                      \
            }                                                                                                          \
            if (most) {                                                                                                \
                f##BITS *top = (f##BITS *)most + at;                                                                   \
                EACH for (size_t i = 0; i < size; i++)                                                                 \
                    top[i] = v[i] > top[i] || v[i] != v[i] ? v[i] : top[i];                                            \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void adam##BITS(void *target, const void *source, const void *mean, const void *roots, size_t count,        \
                           const struct adam_step *step) {                                                             \
        REAL rate = (REAL)step->rate, root = (REAL)step->root, eps = (REAL)step->eps, keep = (REAL)step->keep;         \
        f##BITS scratch[PIECE];                                                                                        \
        keep_order();                                                                                                  \
        for (size_t at = 0, block = step->away ? PIECE : count; at < count; at += block) {                             \
            size_t size = SMALLER(block, count - at);                                                                  \
            const f##BITS *from = (const f##BITS *)source + at, *m = (const f##BITS *)mean + at;                       \
            const f##BITS *r = (const f##BITS *)roots + at;                                                            \
            f##BITS *to = step->away ? scratch : (f##BITS *)target + at;                                               \
            EACH for (size_t i = 0; i < size; i++)                                                                     \
                to[i] = from[i] * keep + rate * m[i] / (r[i] / root + eps);                                            \
            if (step->away)                                                                                            \
                put_away((f##BITS *)target + at, scratch, size * sizeof *to);                                          \
        }                                                                                                              \
        keep_order();                                                                                                  \
    }

ADAM(32, float)
ADAM(64, double)

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

/* Codecs: see shardline/codecs/quantizing. Values are float32. */

enum { CODE_TOP = 127 };

/* Scales of blocks, then codes. Returns 0 where a value is not finite. */
static int int8_encode(void *payload, const void *values, size_t count, size_t block) {
    f32 *scales = payload;
    signed char *codes = (signed char *)(scales + (count + block - 1) / block);
    for (size_t at = 0; at < count; at += block) {
        size_t size = SMALLER(block, count - at);
        const f32 *from = (const f32 *)values + at;
        int32_t most = most32((const u32 *)from, size);
        if (most >= 0x7f800000)
            return 0;
        float scale = (float)of32(most) / CODE_TOP, divisor = scale == 0 ? 1 : scale;
        *scales++ = scale;
        EACH for (size_t i = 0; i < size; i++) {
            float code = from[i] / divisor;
            code = code > CODE_TOP ? CODE_TOP : code;
            code = code < -CODE_TOP ? -CODE_TOP : code;
            /* A sum of this size has no bits for a fraction: rounded to nearest even. */
            codes[at + i] = (signed char)(int)(code + 0x1.8p23f - 0x1.8p23f);
        }
    }
    return 1;
}

/* Returns 0 for a payload that int8_encode does not make. */
static int int8_decode(void *target, const void *payload, size_t count, size_t block) {
    const f32 *scales = payload;
    const signed char *codes = (const signed char *)(scales + (count + block - 1) / block);
    signed char least = 0;
    for (size_t at = 0; at < count; at += block) {
        size_t size = SMALLER(block, count - at);
        f32 *to = (f32 *)target + at;
        const signed char *from = codes + at;
        float scale = *scales++;
        if (!(scale >= 0 && scale <= FLT_MAX))
            return 0;
        for (size_t i = 0; i < size; i++)
            least = from[i] < least ? from[i] : least;
        EACH for (size_t i = 0; i < size; i++)
            to[i] = (float)from[i] * scale;
    }
    return least >= -CODE_TOP;
}

/* Codes of fewer than 8 bits without gaps: eight of them, a byte each, as one number that is folded three times. */

#define EVERY_8 UINT64_C(0x00ff00ff00ff00ff)
#define EVERY_16 UINT64_C(0x0000ffff0000ffff)
#define EVERY_32 UINT64_C(0x00000000ffffffff)

enum { WORDS = BLOCK / 8 };

static void pack(void *target, const void *codes, size_t count, size_t bits) {
    uint64_t words[WORDS];
    unsigned char *to = target;
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t size = SMALLER((size_t)BLOCK, count - at), used = (size + 7) / 8;
        words[used - 1] = 0;
        memcpy(words, (const unsigned char *)codes + at, size);
        for (size_t i = 0; i < used; i++) {
            uint64_t word = words[i];
            word = (word & EVERY_8) | (word >> 8 & EVERY_8) << bits;
            word = (word & EVERY_16) | (word >> 16 & EVERY_16) << 2 * bits;
            words[i] = (word & EVERY_32) | (word >> 32) << 4 * bits;
        }
        /* Each moves down to where the one before ends; what it overwrites has been moved. */
        unsigned char *packed = (unsigned char *)words;
        for (size_t i = 1; i < used; i++) {
            uint64_t word = words[i];
            memcpy(packed + i * bits, &word, sizeof word);
        }
        memcpy(to, packed, (size * bits + 7) / 8);
        to += WORDS * bits;
    }
}

static void unpack(void *codes, const void *payload, size_t count, size_t bits) {
    const uint64_t of4 = (UINT64_C(1) << 4 * bits) - 1;
    const uint64_t of2 = ((UINT64_C(1) << 2 * bits) - 1) * UINT64_C(0x100000001);
    const uint64_t of1 = ((UINT64_C(1) << bits) - 1) * UINT64_C(0x1000100010001);
    const unsigned char *from = payload;
    for (size_t at = 0; at < count; at += BLOCK, from += WORDS * bits) {
        uint64_t words[WORDS];
        unsigned char packed[BLOCK];
        size_t size = SMALLER((size_t)BLOCK, count - at), used = (size + 7) / 8;
        memcpy(packed, from, (size * bits + 7) / 8);
        for (size_t i = 0; i < used; i++)
            memcpy(words + i, packed + i * bits, sizeof *words);
        for (size_t i = 0; i < used; i++) {
            uint64_t word = words[i];
            word = (word & of4) | (word >> 4 * bits & of4) << 32;
            word = (word & of2) | (word >> 2 * bits & of2) << 16;
            words[i] = (word & of1) | (word >> bits & of1) << 8;
        }
        memcpy((unsigned char *)codes + at, words, size);
    }
}

/* Sums in lanes, as shardline/codecs/quantizing/sums.py has them. */

enum { LANES = 128 };

static double lanes_sum(double *lanes) {
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

#define BELOW(value) ((value) < 0 ? (double)(value) : 0)
#define ABOVE(value) ((value) < 0 ? 0 : (double)(value)) /* and NaN */

/* Codes: 1 = negative. sums: of the negatives and of the others, not finite where a value is not. Returns the number
 * of negatives. */
static size_t signs(void *codes, double *sums, const void *values, size_t count) {
    double below[LANES] = {0}, above[LANES] = {0};
    const f32 *from = values;
    unsigned char *to = codes;
    size_t negative = 0;
    for (size_t at = 0; at < count; at += LANES, from += LANES, to += LANES) {
        size_t size = SMALLER((size_t)LANES, count - at);
        unsigned char some = 0;
        if (at % (4 * LANES) == 0 && count - at >= 4 * LANES) { /* four rows while a lane is in a register */
            const f32 *b = from + LANES, *c = b + LANES, *d = c + LANES;
            EACH for (size_t i = 0; i < LANES; i++) {
                below[i] = below[i] + BELOW(from[i]) + BELOW(b[i]) + BELOW(c[i]) + BELOW(d[i]);
                above[i] = above[i] + ABOVE(from[i]) + ABOVE(b[i]) + ABOVE(c[i]) + ABOVE(d[i]);
            }
        } else if (at >= count / (4 * LANES) * (4 * LANES))
            for (size_t i = 0; i < size; i++) {
                below[i] += BELOW(from[i]);
                above[i] += ABOVE(from[i]);
            }
        EACH for (size_t i = 0; i < size; i++) {
            to[i] = from[i] < 0;
            some += to[i];
        }
        negative += some;
    }
    sums[0] = lanes_sum(below);
    sums[1] = lanes_sum(above);
    return negative;
}

/* One of two values for each code, 1 or 0. */
static void either(void *target, const void *codes, float one, float zero, size_t count) {
    f32 *to = target;
    const unsigned char *from = codes;
    EACH for (size_t i = 0; i < count; i++)
        to[i] = from[i] ? one : zero;
}

static void without(void *target, const void *values, const void *codes, float one, float zero, size_t count) {
    f32 *to = target;
    const f32 *all = values;
    const unsigned char *from = codes;
    EACH for (size_t i = 0; i < count; i++)
        to[i] = all[i] - (from[i] ? one : zero);
}

/* Largest magnitude and l2 norm of each block, float32. They return 0 where one is not finite. */

static int tops(void *target, const void *values, size_t count, size_t block) {
    f32 *to = target;
    for (size_t at = 0; at < count; at += block) {
        int32_t most = most32((const u32 *)values + at, SMALLER(block, count - at));
        if (most >= 0x7f800000)
            return 0;
        *to++ = (float)of32(most);
    }
    return 1;
}

static int norms(void *target, const void *values, size_t count, size_t block) {
    f32 *to = target;
    for (size_t at = 0; at < count; at += block) {
        double lanes[LANES] = {0};
        for (size_t row = at, end = at + SMALLER(block, count - at); row < end; row += LANES) {
            const f32 *from = (const f32 *)values + row;
            EACH for (size_t i = 0, size = SMALLER((size_t)LANES, end - row); i < size; i++)
                lanes[i] += (double)from[i] * from[i];
        }
        float norm = (float)__builtin_sqrt(lanes_sum(lanes));
        if (!(norm <= FLT_MAX))
            return 0;
        *to++ = norm;
    }
    return 1;
}

/* Random numbers in [0, 1), two of each of SplitMix64's: see shardline/codecs/random.py */
static void uniforms(float *to, uint64_t seed, size_t at, size_t count) {
    EACH for (size_t i = 0; i < (count + 1) / 2; i++) {
        uint64_t z = seed + (at / 2 + i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
        to[2 * i] = (float)(int32_t)((uint32_t)z >> 8) * 0x1p-24f;
        to[2 * i + 1] = (float)(int32_t)(z >> 40) * 0x1p-24f;
    }
}

/* Values by their block's divisor, rounded up or down at random to at most `top`, and moved up by `base`. */
static void rounded(void *codes, const void *values, const void *divisors, size_t count, size_t block, int top,
                    int base, uint64_t seed) {
    float draws[BLOCK];
    for (size_t at = 0; at < count;) {
        if (at % BLOCK == 0)
            uniforms(draws, seed, at, SMALLER((size_t)BLOCK, count - at));
        size_t row = at / block, room = at % BLOCK, end = SMALLER((row + 1) * block, at - room + BLOCK);
        size_t size = SMALLER(end, count) - at;
        float divisor = ((const f32 *)divisors)[row];
        const f32 *from = (const f32 *)values + at;
        unsigned char *to = (unsigned char *)codes + at;
        EACH for (size_t i = 0; i < size; i++) {
            float value = from[i] / divisor + draws[room + i];
            int code = (int)value - ((float)(int)value > value);
            code = code > top ? top : code < -top ? -top : code;
            to[i] = (unsigned char)(code + base);
        }
        at += size;
    }
}

/* 1 or 2 (of a negative) with the probability |x| / scale, else 0. */
static void ternary(void *codes, const void *values, float scale, size_t count, uint64_t seed) {
    float draws[BLOCK];
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t size = SMALLER((size_t)BLOCK, count - at);
        const f32 *from = (const f32 *)values + at;
        unsigned char *to = (unsigned char *)codes + at;
        uniforms(draws, seed, at, size);
        EACH for (size_t i = 0; i < size; i++) {
            int some = draws[i] * scale < __builtin_fabsf(from[i]), minus = from[i] < 0;
            to[i] = (unsigned char)(some + (some & minus));
        }
    }
}

/* The bin with the rank-th largest number, which becomes the rank within it. */
static uint32_t at_rank(const uint32_t *bins, uint32_t bin, size_t *rank) {
    for (; bins[bin] < *rank; bin--)
        *rank -= bins[bin];
    return bin;
}

/* Ascending indices of the `wanted` largest magnitudes, of equal ones the first: 1 to count. indices: room for count. */
static void largest(void *indices, const void *values, size_t count, size_t wanted) {
    uint32_t bins[1 << 11] = {0};
    const u32 *from = values;
    u32 *to = indices;
    size_t found = 0, kept = 0, rank = wanted;
    for (size_t i = 0; i < count; i++)
        bins[SIZE(32, from[i]) >> 20]++;
    uint32_t least = at_rank(bins, (1 << 11) - 1, &rank);
    for (size_t i = 0; i < count; i++) {
        to[found] = (uint32_t)i;
        found += (uint32_t)SIZE(32, from[i]) >> 20 >= least;
    }
    for (int shift = 10; shift >= 0; shift -= 10) {
        memset(bins, 0, sizeof bins);
        for (size_t i = 0; i < found; i++) {
            uint32_t size = (uint32_t)SIZE(32, from[to[i]]);
            if (size >> (shift + 10) == least)
                bins[size >> shift & 1023]++;
        }
        least = least << 10 | at_rank(bins, 1023, &rank);
    }
    for (size_t i = 0; i < found; i++) {
        uint32_t index = to[i], size = (uint32_t)SIZE(32, from[index]);
        int equal = size == least && rank;
        rank -= equal;
        to[kept] = index;
        kept += equal || size > least;
    }
}

/* Slots of rows by id, open addressing: pairs of an id and its slot + 1, which is 0 in a free pair. last: their number,
 * a power of two, minus 1. See shardline/native/rows.py */

enum { PAIRS_AHEAD = 16, ROWS_AHEAD = 8, GRADIENTS_AHEAD = 2, LINE = 64 };

/* As hashed() of shardline/core/rows.py */
static size_t hashed(uint64_t id) {
    id += UINT64_C(0x9e3779b97f4a7c15);
    id = (id ^ id >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    id = (id ^ id >> 27) * UINT64_C(0x94d049bb133111eb);
    return (size_t)(id ^ id >> 31);
}

/* The pair with the id of this number, or the free one where it would be. The pairs of later ids are on their way. */
static u64 *pair(u64 *pairs, size_t last, const u64 *ids, size_t number, size_t count) {
    uint64_t id = ids[number];
    size_t at = hashed(id) & last;
    if (number + PAIRS_AHEAD < count)
        __builtin_prefetch(pairs + 2 * (hashed(ids[number + PAIRS_AHEAD]) & last));
    while (pairs[2 * at + 1] && pairs[2 * at] != id)
        at = (at + 1) & last;
    return pairs + 2 * at;
}

/* Slots, -1 where there is no row. */
static void slots_find(void *slots, void *pairs, size_t last, const void *ids, size_t count) {
    for (size_t i = 0; i < count; i++)
        ((u64 *)slots)[i] = pair(pairs, last, ids, i, count)[1] - 1;
}

static void slots_put(void *slots, void *pairs, size_t last, const void *ids, size_t count) {
    for (size_t i = 0; i < count; i++) {
        u64 *to = pair(pairs, last, ids, i, count);
        to[0] = ((const u64 *)ids)[i];
        to[1] = ((const u64 *)slots)[i] + 1;
    }
}

/* As slots_find(); then the ids are gone. */
static void slots_drop(void *slots, void *pairs, size_t last, const void *ids, size_t count) {
    u64 *all = pairs;
    for (size_t i = 0; i < count; i++) {
        u64 *from = pair(pairs, last, ids, i, count);
        ((u64 *)slots)[i] = from[1] - 1;
        if (!from[1])
            continue;
        /* Those behind that passed this pair move up. */
        size_t hole = (size_t)(from - all) / 2;
        for (size_t at = (hole + 1) & last; all[2 * at + 1]; at = (at + 1) & last)
            if (((at - hashed(all[2 * at])) & last) >= ((at - hole) & last)) {
                memcpy(all + 2 * hole, all + 2 * at, 2 * sizeof *all);
                hole = at;
            }
        all[2 * hole + 1] = 0;
    }
}

/* The number of ids before the first that is not above the one before it, or not in parts `first` to first + parts - 1
 * of PARTS in shardline/core/rows.py. */
static size_t rows_check(const void *ids, size_t count, size_t first, size_t parts) {
    const u64 *id = ids;
    for (size_t i = 0; i < count; i++)
        if ((i && (int64_t)id[i] <= (int64_t)id[i - 1]) || (hashed(id[i]) >> 54) - first >= parts)
            return i;
    return count;
}

/* Rows of an arena by slot. Of a negative slot nothing is written. */
static void rows_gather(void *rows, const void *arena, const void *slots, size_t count, size_t dim) {
    const int64_t *at = slots;
    for (size_t i = 0; i < count; i++) {
        if (i + ROWS_AHEAD < count && at[i + ROWS_AHEAD] >= 0)
            for (size_t n = 0; n < dim; n += LINE / sizeof(f32))
                __builtin_prefetch((const f32 *)arena + (size_t)at[i + ROWS_AHEAD] * dim + n);
        if (at[i] >= 0)
            memcpy((f32 *)rows + i * dim, (const f32 *)arena + (size_t)at[i] * dim, dim * sizeof(f32));
    }
}

/* left + right of packed rows, both with ascending ids; how many they are. sum: room for these, or NULL: only count. */
static size_t rows_merge(void *sum, size_t room, const void *left, size_t lefts, const void *right, size_t rights,
                         size_t dim) {
    const u64 *a = left, *b = right;
    const f32 *x = (const f32 *)(a + lefts), *y = (const f32 *)(b + rights);
    u64 *ids = sum;
    f32 *to = sum ? (f32 *)(ids + room) : NULL;
    size_t i = 0, j = 0, count = 0;
    for (; i < lefts || j < rights; count++) {
        int from_left = j == rights || (i < lefts && (int64_t)a[i] <= (int64_t)b[j]);
        int from_right = i == lefts || (j < rights && (int64_t)b[j] <= (int64_t)a[i]);
        if (sum) {
            const f32 *p = x + i * dim, *q = y + j * dim;
            ids[count] = from_left ? a[i] : b[j];
            if (from_left && from_right) {
                EACH for (size_t n = 0; n < dim; n++)
                    to[n] = p[n] + q[n];
            } else {
                memcpy(to, from_left ? p : q, dim * sizeof(f32));
            }
            to += dim;
        }
        i += (size_t)from_left;
        j += (size_t)from_right;
    }
    return count;
}

/* First values of rows: see shardline/update/rows/inits.py. start: of the table. */

static float uniform_value(uint64_t bits, float scale) {
    return (float)((int32_t)(bits >> 40) - (1 << 23)) * scale;
}

static float normal_value(uint64_t bits, float scale) {
    int32_t ones = __builtin_popcountll(bits >> 24) - 20, low = (int32_t)(uint32_t)bits;
    return (float)((int32_t)((uint32_t)ones << 12) + ((low & 0xfff) - (low >> 12 & 0xfff))) * scale;
}

#define FIRST(kind)                                                                                                    \
    static void first_##kind(void *rows, const void *ids, size_t count, size_t dim, uint64_t start, float scale) {      \
        f32 *to = rows;                                                                                                \
        for (size_t row = 0; row < count; row++, to += dim) {                                                          \
            const uint64_t counter = hashed(((const u64 *)ids)[row]) ^ start;                                          \
            EACH for (size_t i = 0; i < dim; i++)                                                                      \
                to[i] = kind##_value(hashed(counter + i * UINT64_C(0x9e3779b97f4a7c15)), scale);                       \
        }                                                                                                              \
    }

FIRST(uniform)
FIRST(normal)

/* Update rules of rows: see shardline/update/rows/rules.py. Each changes one row. rows: where it lies in the arena of
 * values and in each state's. numbers: the rate, then the rule's settings in their order. */

static void sgd_row(f32 *const *rows, const f32 *g, size_t dim, const double *numbers) {
    f32 *w = rows[0];
    const float rate = (float)numbers[0], decay = (float)numbers[1];
    EACH for (size_t i = 0; i < dim; i++)
        w[i] = w[i] - (g[i] + w[i] * decay) * rate;
}

/* Vectors by name: compilers make none of so few lanes. */
typedef float floats8 __attribute__((vector_size(32)));
typedef double lanes8 __attribute__((vector_size(64)));

/* Of a row's gradient; in 8 lanes, which are added by halves. */
static float mean_square(const f32 *g, size_t dim) {
    lanes8 sums = {0};
    floats8 some;
    size_t at = 0;
    for (; at + 8 <= dim; at += 8) {
        memcpy(&some, g + at, sizeof some);
        lanes8 wide = __builtin_convertvector(some, lanes8);
        sums += wide * wide;
    }
    if (at < dim) {
        some = (floats8){0};
        memcpy(&some, g + at, (dim - at) * sizeof *g);
        lanes8 wide = __builtin_convertvector(some, lanes8);
        sums += wide * wide;
    }
    return (float)((((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))) /
                   (double)dim);
}

static void rowwise_adagrad_row(f32 *const *rows, const f32 *g, size_t dim, const double *numbers) {
    f32 *w = rows[0], *sum = rows[1];
    *sum += mean_square(g, dim);
    const float scale = (float)numbers[0] / (__builtin_sqrtf(*sum) + (float)numbers[1]);
    EACH for (size_t i = 0; i < dim; i++)
        w[i] = w[i] - scale * g[i];
}

static void adagrad_row(f32 *const *rows, const f32 *g, size_t dim, const double *numbers) {
    f32 *w = rows[0], *sum = rows[1];
    const float rate = (float)numbers[0], eps = (float)numbers[1];
    EACH for (size_t i = 0; i < dim; i++) {
        float total = sum[i] + g[i] * g[i];
        sum[i] = total;
        w[i] = w[i] - g[i] * rate / (__builtin_sqrtf(total) + eps);
    }
}

static double power(double base, uint32_t exponent) {
    double found = 1;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1)
            found *= base;
    return found;
}

static void adam_row(f32 *const *rows, const f32 *g, size_t dim, const double *numbers) {
    f32 *w = rows[0], *step = rows[1], *mean = rows[2], *square = rows[3];
    const double beta1 = numbers[1], beta2 = numbers[2];
    const float keep1 = (float)beta1, share1 = (float)(1 - beta1), keep2 = (float)beta2, share2 = (float)(1 - beta2);
    *step += 1;
    const float rate = (float)(numbers[0] / (1 - power(beta1, (uint32_t)*step)));
    const float root = (float)(1 / __builtin_sqrt(1 - power(beta2, (uint32_t)*step))), eps = (float)numbers[3];
    EACH for (size_t i = 0; i < dim; i++) {
        float m = mean[i] * keep1 + g[i] * share1, s = square[i] * keep2 + g[i] * g[i] * share2;
        mean[i] = m;
        square[i] = s;
        w[i] = w[i] - m * rate / (__builtin_sqrtf(s) * root + eps);
    }
}

static void ftrl_row(f32 *const *rows, const f32 *g, size_t dim, const double *numbers) {
    f32 *w = rows[0], *z = rows[1], *n = rows[2];
    const float per_rate = (float)(1 / numbers[0]), l1 = (float)numbers[1], l2 = (float)numbers[2];
    const float beta = (float)numbers[3];
    EACH for (size_t i = 0; i < dim; i++) {
        float before = __builtin_sqrtf(n[i]), squares = n[i] + g[i] * g[i], root = __builtin_sqrtf(squares);
        float sum = z[i] + (g[i] - (root - before) * per_rate * w[i]);
        float weight = (__builtin_copysignf(l1, sum) - sum) / ((root + beta) * per_rate + l2);
        n[i] = squares;
        z[i] = sum;
        w[i] = __builtin_fabsf(sum) <= l1 ? 0 : weight;
    }
}

/* NEAR is 3 for the nearest cache, on the way to which there is room for a dozen lines only, and 2 for the next. */
#define FETCH(row, width, NEAR)                                                                                        \
    for (size_t i = 0; i < (width); i += LINE / sizeof(f32))                                                           \
    __builtin_prefetch((row) + i, 0, NEAR)

/* See row_rule. */
#define ROWS(rule)                                                                                                     \
    static void rows_##rule(void *const *arenas, const size_t *widths, size_t number, const void *slots,               \
                            const void *gradients, size_t count, const double *numbers) {                              \
        const u64 *at = slots;                                                                                         \
        const f32 *g = gradients;                                                                                      \
        for (size_t row = 0; row < count; row++, g += widths[0]) {                                                     \
            f32 *rows[4];                                                                                              \
            for (size_t n = 0; n < number; n++) {                                                                      \
                rows[n] = (f32 *)arenas[n] + at[row] * widths[n];                                                      \
                if (row + ROWS_AHEAD < count)                                                                          \
                    FETCH((f32 *)arenas[n] + at[row + ROWS_AHEAD] * widths[n], widths[n], 2);                          \
            }                                                                                                          \
            if (row + GRADIENTS_AHEAD < count)                                                                         \
                FETCH(g + GRADIENTS_AHEAD * widths[0], widths[0], 3);                                                  \
            rule##_row(rows, g, widths[0], numbers);                                                                   \
        }                                                                                                              \
    }

ROWS(sgd)
ROWS(rowwise_adagrad)
ROWS(adagrad)
ROWS(adam)
ROWS(ftrl)

#define TABLE_(level) kernels_##level
#define TABLE(level) TABLE_(level)

extern const struct kernels TABLE(LEVEL);
const struct kernels TABLE(LEVEL) = {
    .fma = HAS_FMA,
    .magnitude_fp16 = magnitude_fp16,
    .magnitude_bf16 = magnitude_bf16,
    .magnitude32 = magnitude32,
    .magnitude64 = magnitude64,
    .copies32 = copies32,
    .copies64 = copies64,
    .fingerprint = fingerprint,
    .digest_begin = digest_begin,
    .digest_more = digest_more,
    .digest_end = digest_end,
    .sum32 = sum32,
    .sum64 = sum64,
    .sgd32 = sgd32,
    .sgd64 = sgd64,
    .moments32 = moments32,
    .moments64 = moments64,
    .adam32 = adam32,
    .adam64 = adam64,
    .to_bf16 = to_bf16,
    .from_bf16 = from_bf16,
    .int8_encode = int8_encode,
    .int8_decode = int8_decode,
    .pack = pack,
    .unpack = unpack,
    .signs = signs,
    .either = either,
    .without = without,
    .tops = tops,
    .norms = norms,
    .rounded = rounded,
    .ternary = ternary,
    .largest = largest,
    .slots_find = slots_find,
    .slots_put = slots_put,
    .slots_drop = slots_drop,
    .rows_check = rows_check,
    .rows_gather = rows_gather,
    .rows_merge = rows_merge,
    .first_uniform = first_uniform,
    .first_normal = first_normal,
    .rows_sgd = rows_sgd,
    .rows_rowwise_adagrad = rows_rowwise_adagrad,
    .rows_adagrad = rows_adagrad,
    .rows_adam = rows_adam,
    .rows_ftrl = rows_ftrl,
};
