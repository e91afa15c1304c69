/* Bytes of all kinds and lengths through the compiled code, each in memory that ends where it ends.

   Compiled with sanitizers by test_compiled_memory.py: whatever reads or writes beyond ends this. */

#include "fold.c"
#include "huffman.c"
#include "planes.c"
#include "unhuffman.c"

#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 5;

static uint32_t below(uint32_t limit)
{
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return limit ? state % limit : 0;
}

static byte *exactly(size_t n)
{
  byte *memory = malloc(n + !n);
  if (!memory)
    exit(2);
  return memory;
}

/* Some symbols, the rarer the further up: each of a run of coins decides whether to go on. */
static void draw(byte *data, size_t n)
{
  uint32_t symbols = 1 + below(256), from = below(256), odds = below(20);
  for (size_t i = 0; i < n; i++) {
    uint32_t symbol = odds < 4 ? below(symbols) : 0;
    while (odds >= 4 && below(odds) > 1)
      symbol++;
    data[i] = (byte)(from + symbol % symbols);
  }
}

/* A frame as it is, and in memory that ends where it ends: changed, cut off, too long. */
static void decoded(const byte *frame, size_t length, const byte *data, size_t n)
{
  byte *out = exactly(n);
  if (!unhuffman_frame(frame, length, out, n) || memcmp(out, data, n))
    exit(3);
  for (int changes = n > 6000 ? 36 : 0; changes < 40; changes++) {
    size_t left = changes % 4 ? length : below((uint32_t)length + 1);
    byte *changed = exactly(left);
    memcpy(changed, frame, left);
    for (uint32_t i = 0; left && i <= below(3); i++)
      changed[below(changes % 2 ? (uint32_t)left : left < 100 ? (uint32_t)left : 100)] ^=
          (byte)(1 << below(8));
    unhuffman_frame(changed, left, out, n);
    free(changed);
  }
  free(out);
}

static size_t coded(uint32_t round, void *memory)
{
  size_t n = round % 8 ? below(6000) : 131072 * (1 + below(7)) + below(2050) - 1025;
  size_t room = round % 5 ? n : below((uint32_t)n + 1);
  byte *data = exactly(n), *out = exactly(room);
  draw(data, n);
  size_t length = huffman_frame(data, n, out, room, memory);
  if (length)
    decoded(out, length, data, n);
  free(data), free(out);
  return length;
}

static void folded(void)
{
  size_t n = below(3000);
  byte *data = exactly(n);
  uint64_t sums[2];
  draw(data, n);
  fold_bytes((word8 *)data, n, &sums[0], &sums[1]);
  free(data);
}

static void cut(void)
{
  size_t n = below(500);
  byte *p[8], *raw = exactly(8 * n);
  for (int i = 0; i < 8; i++)
    p[i] = exactly(n);
  draw(raw, 8 * n);
  split_bf16((word2 *)raw, p[0], p[1], n), merge_bf16((word2 *)raw, p[0], p[1], n);
  split_fp16((word2 *)raw, p[0], p[1], n), merge_fp16((word2 *)raw, p[0], p[1], n);
  split_fp32((word4 *)raw, p[0], p[1], p[2], p[3], n);
  merge_fp32((word4 *)raw, p[0], p[1], p[2], p[3], n);
  split_fp64((word8 *)raw, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], n);
  merge_fp64((word8 *)raw, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], n);
  for (int i = 0; i < 8; i++)
    free(p[i]);
  free(raw);
}

int main(void)
{
  unsigned frames = 0, rounds = 1500;
  void *memory = calloc(1, huffman_scratch_bytes());
  if (!memory)
    return 2;
  for (unsigned round = 0; round < rounds; round++)
    frames += coded(round, memory) > 0, cut(), folded();
  free(memory);
  printf("%u of %u\n", frames, rounds);
  return 0;
}
