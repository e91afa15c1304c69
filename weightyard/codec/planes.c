/* What planes.py does, in one pass instead of several: docs/format.md, section 3.

   Compiled when the package is built, if there is a compiler (hatch_build.py); called by
   compiled.py. No intrinsics: plain loops (widest.h). */

#include "widest.h"

#include <stddef.h>

WIDEST void split_bf16(const word2 *restrict words, byte *restrict p0, byte *restrict p1, size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint16_t w = words[i];
    p0[i] = (byte)(w >> 7), p1[i] = (byte)((w >> 8 & 0x80) | (w & 0x7F));
  }
}

WIDEST void merge_bf16(word2 *restrict words, const byte *restrict p0, const byte *restrict p1,
                       size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint16_t e = p0[i], m = p1[i];
    words[i] = (uint16_t)((m & 0x80) << 8 | e << 7 | (m & 0x7F));
  }
}

WIDEST void split_fp16(const word2 *restrict words, byte *restrict p0, byte *restrict p1, size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint16_t w = words[i];
    p0[i] = (byte)(w >> 8), p1[i] = (byte)w;
  }
}

WIDEST void merge_fp16(word2 *restrict words, const byte *restrict p0, const byte *restrict p1,
                       size_t n)
{
  for (size_t i = 0; i < n; i++)
    words[i] = (uint16_t)(p0[i] << 8 | p1[i]);
}

WIDEST void split_fp32(const word4 *restrict words, byte *restrict p0, byte *restrict p1,
                       byte *restrict p2, byte *restrict p3, size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint32_t w = words[i];
    p0[i] = (byte)(w >> 23), p1[i] = (byte)((w >> 24 & 0x80) | (w >> 16 & 0x7F));
    p2[i] = (byte)(w >> 8), p3[i] = (byte)w;
  }
}

WIDEST void merge_fp32(word4 *restrict words, const byte *restrict p0, const byte *restrict p1,
                       const byte *restrict p2, const byte *restrict p3, size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint32_t e = p0[i], m = p1[i];
    words[i] = (m & 0x80) << 24 | e << 23 | (m & 0x7F) << 16 | (uint32_t)p2[i] << 8 | p3[i];
  }
}

WIDEST void split_fp64(const word8 *restrict words, byte *restrict p0, byte *restrict p1,
                       byte *restrict p2, byte *restrict p3, byte *restrict p4, byte *restrict p5,
                       byte *restrict p6, byte *restrict p7, size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint64_t w = words[i];
    p0[i] = (byte)(w >> 55);
    p1[i] = (byte)((w >> 47 & 0xE0) | (w >> 59 & 0x10) | (w >> 48 & 0x0F));
    p2[i] = (byte)(w >> 40), p3[i] = (byte)(w >> 32);
    p4[i] = (byte)(w >> 24), p5[i] = (byte)(w >> 16), p6[i] = (byte)(w >> 8), p7[i] = (byte)w;
  }
}

WIDEST void merge_fp64(word8 *restrict words, const byte *restrict p0, const byte *restrict p1,
                       const byte *restrict p2, const byte *restrict p3, const byte *restrict p4,
                       const byte *restrict p5, const byte *restrict p6, const byte *restrict p7,
                       size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint32_t e = p0[i], m = p1[i];
    uint32_t top = (m & 0x10) << 11 | e << 7 | (m & 0xE0) >> 1 | (m & 0x0F);
    uint32_t high = top << 16 | (uint32_t)p2[i] << 8 | p3[i];
    uint32_t low = (uint32_t)p4[i] << 24 | (uint32_t)p5[i] << 16 | (uint32_t)p6[i] << 8 | p7[i];
    words[i] = (uint64_t)high << 32 | low;
  }
}
