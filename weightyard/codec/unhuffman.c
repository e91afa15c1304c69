/* Decodes what huffman.c codes, up to six symbols at a time: nearly twice as fast as zstd.

   Frames come from anywhere, so nothing here is believed before it is looked at: every read lies in
   the frame, every write in the output, and a table has an entry for whatever bits come. What is not
   exactly as huffman.c makes it is left to zstd, which decides whether it is a frame at all.
   Compiled and called as planes.c is. */

#include "huffman.h"

#include <stddef.h>
#include <string.h>

enum {
  MAX_JOINED = 6,                 /* symbols of an entry */
  COUNT_SHIFT = 8, JOINED_SHIFT = 16,
  ONE = 1 << COUNT_SHIFT, FIELDS = (1 << JOINED_SHIFT) - 1,
  LOOKS = 5,                      /* between two loads of bits: 5 * MAX_BITS + 7 fit 64, with a mark */
  LOOKS_BYTES = LOOKS * MAX_JOINED + 2, /* that they may write: the last one eight */
};

/* How to go on where the next bits are these: the bits to take, how many symbols they are, and from
   JOINED_SHIFT on the symbols. Those of `length` bits alone begin at 1 << length. */
typedef struct {
  uint64_t entries[2 << MAX_BITS];
  byte bits[SYMBOLS];             /* 0: does not occur */
} decoder;

/* Bits from the last to the first: `left` of those that begin at `begin`. */
typedef struct {
  const byte *begin;
  size_t left;
} backwards;

/* The 16 bits that come next; zeros after the last. */
static unsigned peek(const backwards *b)
{
  size_t top = (b->left + 7) / 8;
  uint32_t three = 0;
  for (size_t i = 1; i <= 3; i++)
    three = three << 8 | (i <= top ? b->begin[top - i] : 0);
  return (three << (8 * top - b->left) & 0xFFFFFF) >> 8;
}

/* A stream ends with a mark, the highest bit of its last byte. Returns 0 if there is none. */
static int opened(const byte *begin, size_t n, backwards *b)
{
  if (!n || !begin[n - 1])
    return 0;
  unsigned unused = 8;
  for (unsigned last = begin[n - 1]; last; last >>= 1)
    unused--;
  *b = (backwards){begin, 8 * n - unused - 1};
  return 1;
}

/* Up to 11 bits. Returns 0 if there are not as many. */
static int take(backwards *b, unsigned bits, unsigned *value)
{
  if (bits > b->left)
    return 0;
  *value = peek(b) >> (16 - bits);
  b->left -= bits;
  return 1;
}

/* The shares that huffman.c gave to the weights: RFC 8878, 4.1.1. Returns how many bytes say them; 0
   if they do not. */
static size_t read_shares(const byte *data, size_t n, byte *shares)
{
  size_t at = 4;
  int left = STATES + 1, threshold = STATES, bits = STATES_LOG + 1, w = 0;
  if (!n || (data[0] & 15) != STATES_LOG - 5)
    return 0;
  memset(shares, 0, WEIGHTS);
  while (left > 1) {
    uint32_t next = 0;
    for (size_t i = 0; i < 3; i++)
      next |= at / 8 + i < n ? (uint32_t)data[at / 8 + i] << 8 * i : 0;
    next >>= at % 8;
    int most = 2 * threshold - 1 - left, value = (int)next & (threshold - 1);
    if (value < most) {
      at += (size_t)bits - 1;
    } else {
      value = (int)next & (2 * threshold - 1);
      value -= value >= threshold ? most : 0;
      at += (size_t)bits;
    }
    if (--value < 0 || w == WEIGHTS) /* shares of less than one are not for us */
      return 0;
    left -= value;
    shares[w++] = (byte)value;
    while (left < threshold && threshold > 1)
      bits--, threshold >>= 1;
    for (int zeros = value ? 0 : 3; zeros == 3;) { /* more of them, after the first */
      zeros = at / 8 < n ? data[at / 8] >> at % 8 : 0;
      zeros |= at / 8 + 1 < n ? data[at / 8 + 1] << (8 - at % 8) : 0;
      zeros &= 3;
      at += 2, w += zeros;
      if (w > WEIGHTS)
        return 0;
    }
  }
  at = (at + 7) / 8;
  return left == 1 && at <= n ? at : 0;
}

/* Weights coded by two machines that take turns: RFC 8878, 4.2.1.2. Returns how many; 0 if none. */
static int read_coded_weights(const byte *data, size_t n, byte *weights)
{
  byte shares[WEIGHTS], spread[STATES], taken[STATES], next[STATES];
  size_t described = read_shares(data, n, shares);
  backwards b;
  if (!described || !opened(data + described, n - described, &b))
    return 0;
  int at = 0;
  for (int w = 0; w < WEIGHTS; w++)
    for (int i = 0; i < shares[w]; i++, at = (at + STATES_STEP) % STATES)
      spread[at] = (byte)w;
  for (int u = 0; u < STATES; u++) {
    int state = shares[spread[u]]++, bits = 0;
    while (state << bits < STATES)
      bits++;
    taken[u] = (byte)bits, next[u] = (byte)((state << bits) - STATES);
  }
  unsigned state[2], more;
  if (!take(&b, STATES_LOG, &state[0]) || !take(&b, STATES_LOG, &state[1]))
    return 0;
  for (int i = 0; i < SYMBOLS - 2; i++) {
    unsigned *turn = &state[i & 1];
    weights[i] = spread[*turn];
    if (!take(&b, taken[*turn], &more)) { /* nothing left for it: what the other has is the last */
      weights[i + 1] = spread[state[~i & 1]];
      return i + 2;
    }
    *turn = next[*turn] + more;
  }
  return 0;
}

/* Bits of each symbol: RFC 8878, 4.2.1. Returns how many bytes describe them; 0 if they do not. */
static size_t read_tree(const byte *data, size_t n, decoder *d)
{
  byte weights[SYMBOLS] = {0};
  if (!n)
    return 0;
  int symbols = data[0] - 127, count[WEIGHTS] = {0}, used = 0, depth = 0;
  size_t described = symbols > 0 ? 1 + ((size_t)symbols + 1) / 2 : 1 + (size_t)data[0];
  if (described > n)
    return 0;
  if (symbols > 0) {
    for (int s = 0; s < symbols; s++)
      weights[s] = s % 2 ? data[1 + s / 2] & 15 : data[1 + s / 2] >> 4;
  } else {
    symbols = read_coded_weights(data + 1, data[0], weights);
    if (!symbols)
      return 0;
  }
  for (int s = 0; s < symbols; s++) {
    if (weights[s] > MAX_BITS)
      return 0;
    used += 1 << weights[s] >> 1;
  }
  while (1 << depth <= used)
    depth++;
  int rest = (1 << depth) - used; /* is the last one's, and leaves no bit pattern unused */
  if (!used || depth > MAX_BITS || rest & (rest - 1))
    return 0;
  while (1 << weights[symbols] >> 1 < rest)
    weights[symbols]++;
  memset(d->bits, 0, sizeof d->bits);
  for (int s = 0; s <= symbols; s++) {
    count[weights[s]]++;
    d->bits[s] = weights[s] ? (byte)(depth + 1 - weights[s]) : 0;
  }
  return count[1] >= 2 ? described : 0; /* else codes are shorter than they seem */
}

/* Entries of one symbol, and of it with all that may follow it in the bits that it leaves. */
static WIDEST uint64_t *join(uint64_t *out, uint64_t symbol, uint64_t bits, const uint64_t *after,
                             size_t n)
{
  for (size_t i = 0; i < n; i++) {
    uint64_t e = after[i] >> COUNT_SHIFT & 7;
    e = e < MAX_JOINED ? after[i] : 0;
    out[i] = ((e & ~(uint64_t)FIELDS) << 8 | symbol << JOINED_SHIFT) + (e & FIELDS) + ONE + bits;
  }
  return out + n;
}

static void make_entries(decoder *d)
{
  byte order[SYMBOLS]; /* the longest codes first, as they are numbered */
  int n = 0;
  for (int bits = MAX_BITS; bits > 0; bits--)
    for (int s = 0; s < SYMBOLS; s++)
      if (d->bits[s] == bits)
        order[n++] = (byte)s;
  for (int length = 0; length <= MAX_BITS; length++) {
    uint64_t *out = d->entries + ((size_t)1 << length), *end = out + ((size_t)1 << length);
    size_t filled = 0;
    for (int i = 0; i < n; i++)
      filled += d->bits[order[i]] <= length ? (size_t)1 << (length - d->bits[order[i]]) : 0;
    for (; out < end - filled; out++)
      *out = 0; /* too few bits to know the symbol */
    for (int i = 0; i < n; i++) {
      int left = length - d->bits[order[i]];
      if (left >= 0)
        out = join(out, order[i], d->bits[order[i]], d->entries + (1 << left), (size_t)1 << left);
    }
  }
}

/* Symbol by symbol to the end of a stream, which must be that of its bits too. */
static int decode_rest(backwards *b, byte *out, const byte *end, const decoder *d)
{
  for (; out < end; out++) {
    uint64_t e = d->entries[1 << MAX_BITS | peek(b) >> (16 - MAX_BITS)];
    byte symbol = (byte)(e >> JOINED_SHIFT);
    if (d->bits[symbol] > b->left)
      return 0;
    b->left -= d->bits[symbol];
    *out = symbol;
  }
  return !b->left;
}

/* A stream that is far from its ends. The bits that come next are at the top; the lowest bit that is
   set is a mark, below which are those that were taken. */
typedef struct {
  const byte *in;
  uint64_t bits;
  byte *out;
} source;

static inline uint64_t marked(const byte *in)
{
  uint64_t bits;
  memcpy(&bits, in, sizeof bits); /* little-endian, as compiled.py requires */
  return bits | 1;
}

static inline void look(source *s, const uint64_t *entries)
{
  uint64_t e = entries[s->bits >> (64 - MAX_BITS)], symbols = e >> JOINED_SHIFT;
  memcpy(s->out, &symbols, sizeof symbols);
  s->out += e >> COUNT_SHIFT & 255;
  s->bits <<= e & 63;
}

static inline void load(source *s)
{
  unsigned taken = (unsigned)__builtin_ctzll(s->bits);
  s->in -= taken >> 3;
  s->bits = marked(s->in) << (taken & 7);
}

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* How often LOOKS can surely be taken. */
static size_t rounds(const source *s, const backwards *b, const byte *end)
{
  size_t room = (size_t)(end - s->out), bytes = (size_t)(s->in - b->begin);
  return room < LOOKS_BYTES ? 0 : least((room - 2) / (LOOKS * MAX_JOINED), bytes / 8);
}

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define SHIFTING __attribute__((target_clones("bmi2", "default")))
#endif
#endif
#ifndef SHIFTING
#define SHIFTING
#endif

/* The four streams by turns, each while all are far from their ends. */
static SHIFTING void decode_four(backwards *b, byte **out, byte *const *end, const decoder *d)
{
  const uint64_t *entries = d->entries + (1 << MAX_BITS);
  source s[STREAMS];
  size_t n = SIZE_MAX;
  for (int k = 0; k < STREAMS; k++) {
    size_t bytes = (b[k].left + 7) / 8;
    if (bytes < 8)
      return;
    s[k].in = b[k].begin + bytes - 8;
    s[k].bits = marked(s[k].in) << (8 * bytes - b[k].left);
    s[k].out = out[k];
    n = least(n, rounds(&s[k], &b[k], end[k]));
  }
  source s0 = s[0], s1 = s[1], s2 = s[2], s3 = s[3]; /* in registers */
  while (n) {
    for (; n; n--) {
      for (int i = 0; i < LOOKS; i++)
        look(&s0, entries), look(&s1, entries), look(&s2, entries), look(&s3, entries);
      load(&s0), load(&s1), load(&s2), load(&s3);
    }
    n = least(least(rounds(&s0, &b[0], end[0]), rounds(&s1, &b[1], end[1])),
              least(rounds(&s2, &b[2], end[2]), rounds(&s3, &b[3], end[3])));
  }
  s[0] = s0, s[1] = s1, s[2] = s2, s[3] = s3;
  for (int k = 0; k < STREAMS; k++) {
    for (n = rounds(&s[k], &b[k], end[k]); n; n = rounds(&s[k], &b[k], end[k]))
      for (; n; n--) {
        for (int i = 0; i < LOOKS; i++)
          look(&s[k], entries);
        load(&s[k]);
      }
    b[k].left = 8 * (size_t)(s[k].in + 8 - b[k].begin) - (unsigned)__builtin_ctzll(s[k].bits);
    out[k] = s[k].out;
  }
}

/* Literals in four streams: RFC 8878, 3.1.1.3.1.6. */
static int decode_streams(const byte *data, size_t n, byte *out, size_t symbols, const decoder *d)
{
  backwards b[STREAMS];
  byte *at[STREAMS], *ends[STREAMS];
  size_t step = (symbols + STREAMS - 1) / STREAMS, begin = JUMP_BYTES;
  if (n < JUMP_BYTES || symbols < LEAST_BYTES)
    return 0;
  for (int k = 0; k < STREAMS; k++) {
    size_t size = n - begin;
    if (k < STREAMS - 1) {
      size_t said = data[2 * k] | (size_t)data[2 * k + 1] << 8;
      if (said > size)
        return 0;
      size = said;
    }
    if (!opened(data + begin, size, &b[k]))
      return 0;
    begin += size;
    at[k] = out + k * step, ends[k] = k < STREAMS - 1 ? at[k] + step : out + symbols;
  }
  decode_four(b, at, ends, d);
  for (int k = 0; k < STREAMS; k++)
    if (!decode_rest(&b[k], at[k], ends[k], d))
      return 0;
  return 1;
}

static uint64_t read_little(const byte *data, int bytes)
{
  uint64_t value = 0;
  for (int i = 0; i < bytes; i++)
    value |= (uint64_t)data[i] << 8 * i;
  return value;
}

/* Fill `out` from a frame of exactly that content. Returns 0 if that is not for this decoder; `out`
   may have anything in it then. */
int unhuffman_frame(const byte *frame, size_t n, byte *out, size_t room)
{
  decoder d;
  const byte *in = frame + FRAME_HEADER_BYTES, *end = frame + n;
  int has_tree = 0, is_last = 0;
  if (n < FRAME_HEADER_BYTES || read_little(frame, 4) != MAGIC || frame[4] != DESCRIPTOR ||
      read_little(frame + 5, 4) != room)
    return 0;
  while (!is_last) {
    enum { HEADERS_BYTES = BLOCK_HEADER_BYTES + LITERALS_HEADER_BYTES };
    if ((size_t)(end - in) < HEADERS_BYTES)
      return 0;
    uint64_t block = read_little(in, BLOCK_HEADER_BYTES);
    uint64_t literals = read_little(in + BLOCK_HEADER_BYTES, LITERALS_HEADER_BYTES);
    size_t bytes = block >> 3, symbols = literals >> 4 & ((1 << LONG_BITS) - 1);
    size_t coded = literals >> (4 + LONG_BITS);
    unsigned kind = literals & 3;
    is_last = block & 1;
    in += HEADERS_BYTES;
    if ((block >> 1 & 3) != COMPRESSED || (literals >> 2 & 3) != LONG_SIZES)
      return 0;
    /* After the literals comes one byte: there are no sequences. */
    if (bytes > BLOCK_BYTES || bytes != LITERALS_HEADER_BYTES + coded + 1 ||
        (size_t)(end - in) < coded + 1 || in[coded])
      return 0;
    if (symbols > BLOCK_BYTES || symbols > room || kind < WITH_TREE || (kind == AS_BEFORE && !has_tree))
      return 0;
    size_t described = 0;
    if (kind == WITH_TREE) {
      described = read_tree(in, coded, &d);
      if (!described)
        return 0;
      make_entries(&d), has_tree = 1;
    }
    if (!decode_streams(in + described, coded - described, out, symbols, &d))
      return 0;
    in += coded + 1, out += symbols, room -= symbols;
  }
  return !room && in == end;
}
