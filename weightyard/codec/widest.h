/* Words that lie little-endian in memory that need not be aligned, and the loops over them.

   Plain loops are turned into vector instructions by every compiler; on x86 glibc chooses the widest
   when the library is loaded. */

#ifndef WIDEST_H
#define WIDEST_H

#include <stdint.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones) && defined(__clang__)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#elif __has_attribute(target_clones)
#define WIDEST __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#endif
#endif
#ifndef WIDEST
#define WIDEST
#endif

typedef uint8_t byte;
typedef uint16_t word2 __attribute__((aligned(1), may_alias));
typedef uint32_t word4 __attribute__((aligned(1), may_alias));
typedef uint64_t word8 __attribute__((aligned(1), may_alias));

#endif
