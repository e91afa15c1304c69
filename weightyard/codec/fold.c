/* What folding.py does, in one pass instead of several: docs/format.md, section 2.

   Compiled and called as planes.c is. Multiplying words of 64 bits is slow, adding them is not: a sum
   of the sums so far counts a word once for each that comes after it. */

#include "widest.h"

#include <stddef.h>
#include <string.h>

enum { LANES = 32 };              /* words in a row, each summed by itself */

WIDEST void fold_bytes(const word8 *words, size_t bytes, uint64_t *total, uint64_t *weighted)
{
  size_t n = bytes / sizeof *words, rows = n / LANES, at = 0;
  uint64_t sums[LANES] = {0}, sums_of_sums[LANES] = {0}, all = 0, by_place = 0;
  for (size_t row = 0; row < rows; row++)
    for (int k = 0; k < LANES; k++, at++) {
      sums_of_sums[k] += sums[k];
      sums[k] += words[at];
    }
  for (int k = 0; k < LANES; k++) {
    uint64_t by_row = (rows - 1) * sums[k] - sums_of_sums[k];
    all += sums[k];
    by_place += LANES * by_row + (uint64_t)(k + 1) * sums[k];
  }
  for (; at < n; at++)
    all += words[at], by_place += (at + 1) * words[at];
  uint64_t last = 0;              /* with zeros at its end */
  memcpy(&last, words + n, bytes % sizeof last);
  *total = all + last, *weighted = by_place + (n + 1) * last;
}
