/* What Python loads: which levels this machine can run, and the kernels of each. */
#include "kernels.h"

#define ABI 11
#define PUBLIC __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <cpuid.h>

extern const struct kernels kernels_sse2, kernels_avx2, kernels_avx512;
static const char *const names[] = {"sse2", "avx2", "avx512"};
static const struct kernels *const tables[] = {&kernels_sse2, &kernels_avx2, &kernels_avx512};

/* The registers that the operating system saves. */
static uint64_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* By cpuid itself: __builtin_cpu_supports says no to everything in some builds of clang. */
static int best_level(void) {
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, YMM = 0x6, ZMM = 0xe6 };
    const uint32_t avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (FMA | OSXSAVE)) != (FMA | OSXSAVE))
        return 0;
    uint64_t saved = saved_registers();
    if ((saved & YMM) != YMM || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & avx2))
        return 0;
    return (saved & ZMM) == ZMM && (b & avx512) == avx512 ? 2 : 1;
}

#elif defined(__aarch64__)

extern const struct kernels kernels_neon;
static const char *const names[] = {"neon"};
static const struct kernels *const tables[] = {&kernels_neon};

static int best_level(void) { return 0; }

#else
#error "no kernels for this processor"
#endif

PUBLIC int shardline_abi(void) { return ABI; }

/* Levels that this machine can run: 0 to this one. */
PUBLIC int shardline_best(void) { return best_level(); }

PUBLIC const char *shardline_name(int level) { return names[level]; }

/* level: at most shardline_best(). */
PUBLIC const struct kernels *shardline_kernels(int level) { return tables[level]; }
