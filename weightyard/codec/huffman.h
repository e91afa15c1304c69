/* What huffman.c codes and unhuffman.c decodes has in common: zstd frames of literals alone, as
   RFC 8878 has them, whose sections are named. */

#ifndef HUFFMAN_H
#define HUFFMAN_H

#include "widest.h"

enum {
  MAX_BITS = 11,                  /* of a code: what the format allows */
  SYMBOLS = 256,
  MAX_PLAIN = 128,                /* the greatest symbol of a tree that is described plainly */
  STATES_LOG = 6, STATES = 1 << STATES_LOG, WEIGHTS = MAX_BITS + 1,
  STATES_STEP = STATES / 2 + STATES / 8 + 3,
  BLOCK_BYTES = 128 * 1024,       /* of a frame, at most */
  LEAST_BYTES = 64,               /* of a block: four streams want some each */
  STREAMS = 4,
  MAGIC = 0xFD2FB528u,
  DESCRIPTOR = 2 << 6 | 1 << 5,   /* of a frame: its length in four bytes; its window is as long */
  FRAME_HEADER_BYTES = 9, BLOCK_HEADER_BYTES = 3, LITERALS_HEADER_BYTES = 5, JUMP_BYTES = 6,
  COMPRESSED = 2,                 /* a block, of literals and sequences */
  WITH_TREE = 2, AS_BEFORE = 3,   /* literals, by a tree of their own or that of the block before */
  LONG_SIZES = 3,                 /* of literals: four streams, sizes of LONG_BITS */
  LONG_BITS = 18,
};

#endif
