/* What every level of the processor has a version of. kernels.c is compiled once per level and fills in one table.
 * Nothing here allocates, blocks or keeps a pointer; any number of threads may call at once. */
#ifndef SHARDLINE_KERNELS_H
#define SHARDLINE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Tensors may lie at any address: bytes of a message are used where they came in. */
typedef float f32 __attribute__((aligned(1), may_alias));
typedef double f64 __attribute__((aligned(1), may_alias));
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

/* One step of torch.optim.SGD. momentum_buffer: NULL where momentum is 0. */
struct sgd_step {
    double rate;         /* minus lr */
    double momentum;
    double share;        /* 1 - dampening: the gradient's part of the new momentum */
    double weight_decay;
    int nesterov;
    int maximize;
    int first;           /* the momentum buffer has nothing in it yet */
    int fused;           /* a * b + c is rounded once */
    int away;            /* the values are written past the cache */
};

/* One step of torch.optim.Adam or AdamW. */
struct adam_step {
    double rate;         /* minus lr, over the first moment's bias */
    double share;        /* 1 - beta1: the gradient's part of the new mean */
    double beta2;
    double rest;         /* 1 - beta2 */
    double root;         /* of the second moment's bias */
    double eps;
    double weight_decay; /* Adam's, added to the gradient */
    double keep;         /* AdamW's decay: what the values are multiplied with */
    int maximize;
    int fused;           /* a * b + c is rounded once */
    int away;            /* the values are written past the cache */
};

/* arenas: of values, then of states, float32; widths: elements per row of each, at most 4. slots: distinct, as many as
 * rows of gradients. numbers: the rate, then the rule's settings. */
typedef void row_rule(void *const *arenas, const size_t *widths, size_t number, const void *slots,
                      const void *gradients, size_t count, const double *numbers);

struct kernels {
    int fma;             /* this level can do `fused` */
    /* Largest magnitude: NaN where an element is, 0 without elements. */
    double (*magnitude_fp16)(const void *values, size_t count);
    double (*magnitude_bf16)(const void *values, size_t count);
    double (*magnitude32)(const void *values, size_t count);
    double (*magnitude64)(const void *values, size_t count);
    /* The same of all that is copied: so many parts, each of its own length. A part's target may be its source.
     * away: written past the cache. */
    double (*copies32)(void *const *targets, const void *const *sources, const size_t *counts, size_t parts, int away);
    double (*copies64)(void *const *targets, const void *const *sources, const size_t *counts, size_t parts, int away);
    /* Of a sample of at least 64 KiB, never 0. */
    uint64_t (*fingerprint)(const void *data, size_t size);
    /* xxh3-64 of bytes that come in parts, never 0. state: an XXH3_state_t. */
    void (*digest_begin)(void *state);
    void (*digest_more)(void *state, const void *data, size_t size);
    uint64_t (*digest_end)(const void *state);
    /* out may be one of two values, and of more than two none. */
    void (*sum32)(void *out, const void *const *values, size_t replicas, size_t count);
    void (*sum64)(void *out, const void *const *values, size_t replicas, size_t count);
    void (*sgd32)(void *target, const void *source, const void *gradient, void *momentum_buffer, size_t count,
                  const struct sgd_step *step);
    void (*sgd64)(void *target, const void *source, const void *gradient, void *momentum_buffer, size_t count,
                  const struct sgd_step *step);
    /* most: NULL without amsgrad. */
    void (*moments32)(void *mean, void *square, void *most, const void *source, const void *gradient, size_t count,
                      const struct adam_step *step);
    void (*moments64)(void *mean, void *square, void *most, const void *source, const void *gradient, size_t count,
                      const struct adam_step *step);
    /* roots: of the squares, or of most. */
    void (*adam32)(void *target, const void *source, const void *mean, const void *roots, size_t count,
                   const struct adam_step *step);
    void (*adam64)(void *target, const void *source, const void *mean, const void *roots, size_t count,
                   const struct adam_step *step);
    void (*to_bf16)(void *target, const void *source, size_t count);
    void (*from_bf16)(void *target, const void *source, size_t count);
    /* Parts of gradients as codecs write them. Payloads may lie at any address; nothing overlaps. */
    int (*int8_encode)(void *payload, const void *values, size_t count, size_t block);
    int (*int8_decode)(void *target, const void *payload, size_t count, size_t block);
    /* Codes are a byte each; bits: 1 to 7. */
    void (*pack)(void *target, const void *codes, size_t count, size_t bits);
    void (*unpack)(void *codes, const void *payload, size_t count, size_t bits);
    size_t (*signs)(void *codes, double *sums, const void *values, size_t count);
    void (*either)(void *target, const void *codes, float one, float zero, size_t count);
    void (*without)(void *target, const void *values, const void *codes, float one, float zero, size_t count);
    int (*tops)(void *target, const void *values, size_t count, size_t block);
    int (*norms)(void *target, const void *values, size_t count, size_t block);
    void (*rounded)(void *codes, const void *values, const void *divisors, size_t count, size_t block, int top, int base,
                    uint64_t seed);
    void (*ternary)(void *codes, const void *values, float scale, size_t count, uint64_t seed);
    void (*largest)(void *indices, const void *values, size_t count, size_t wanted);
    /* Rows of embedding tables: slots by id, sums, first values, and update rules. */
    void (*slots_find)(void *slots, void *pairs, size_t last, const void *ids, size_t count);
    void (*slots_put)(void *slots, void *pairs, size_t last, const void *ids, size_t count);
    void (*slots_drop)(void *slots, void *pairs, size_t last, const void *ids, size_t count);
    size_t (*rows_check)(const void *ids, size_t count, size_t first, size_t parts);
    void (*rows_gather)(void *rows, const void *arena, const void *slots, size_t count, size_t dim);
    size_t (*rows_merge)(void *sum, size_t room, const void *left, size_t lefts, const void *right, size_t rights,
                         size_t dim);
    void (*first_uniform)(void *rows, const void *ids, size_t count, size_t dim, uint64_t start, float scale);
    void (*first_normal)(void *rows, const void *ids, size_t count, size_t dim, uint64_t start, float scale);
    row_rule *rows_sgd, *rows_rowwise_adagrad, *rows_adagrad, *rows_adam, *rows_ftrl;
};

#endif
