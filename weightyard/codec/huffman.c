/* Numbers of which some are frequent, Huffman coded: standard zstd frames without a single match.

   zstd's own coder counts every byte, and then codes one at a time. This one counts a sample, and
   codes 32 at a time where the processor can (huffman_wide.h), else two by a table of pairs. What it
   makes any zstd reads (RFC 8878, whose sections are named below); who stores it decodes it first, by
   zstd. Compiled and called as planes.c is.

   It stays within its memory whatever the bytes are, also if someone changes them meanwhile: no entry
   of its tables has more bits than the longest code, and one that was never set has none. */

#include "huffman.h"

#include <stddef.h>
#include <string.h>

enum {
  DESCRIBED_BYTES = 128,          /* of a tree, at most */
  STREAM_BYTES = BLOCK_BYTES / STREAMS * MAX_BITS / 8 + 64,
  COUNT_ALL_BYTES = 64 * 1024,    /* and of more than that a sample */
  SAMPLE_BYTES = 64, SAMPLE_STEP = 1024,
  MAX_UNSEEN = 12,                /* symbols that get a code in case they occur */
};

/* All zero before it is used first. */
typedef struct {
  uint32_t counts[STREAMS][SYMBOLS];
  uint64_t pairs[1 << 16];        /* by `entry`; only those of symbols that occur are set */
  byte streams[STREAMS][STREAM_BYTES];
} scratch;

typedef struct {
  int first, last;                /* the least symbol other than 0, and the greatest */
  int depth;                      /* bits of the longest code */
  byte bits[SYMBOLS];             /* 0: does not occur */
  uint16_t code[SYMBOLS];
} tree;

size_t huffman_scratch_bytes(void) { return sizeof(scratch); }

/* Symbols by how often they occur, the rarest first, and how many they are. */
static int sorted(const uint32_t *count, byte *order)
{
  int n = 0;
  for (int s = 0; s < SYMBOLS; s++) {
    if (!count[s])
      continue;
    int at = n++;
    for (; at && count[order[at - 1]] > count[s]; at--)
      order[at] = order[at - 1];
    order[at] = (byte)s;
  }
  return n;
}

/* Bits of each symbol in that order: two queues, of leaves and of joined nodes. */
static void depths(const uint32_t *count, const byte *order, int n, int *depth)
{
  uint32_t weight[2 * SYMBOLS];
  int parent[2 * SYMBOLS];
  int leaf = 0, joined = n;
  for (int i = 0; i < n; i++)
    weight[i] = count[order[i]];
  for (int made = n; made < 2 * n - 1; made++) {
    weight[made] = 0;
    for (int two = 0; two < 2; two++) {
      int least = leaf < n && (joined == made || weight[leaf] <= weight[joined]) ? leaf++ : joined++;
      weight[made] += weight[least];
      parent[least] = made;
    }
  }
  int level[2 * SYMBOLS];
  level[2 * n - 2] = 0;
  for (int i = 2 * n - 3; i >= 0; i--)
    level[i] = level[parent[i]] + 1;
  memcpy(depth, level, (size_t)n * sizeof *depth);
}

/* Codes of at most MAX_BITS that leave no bit pattern unused. Returns 0 where there are none. */
static int limited(int *depth, int n)
{
  int used = 0;
  for (int i = 0; i < n; i++) {
    if (depth[i] > MAX_BITS)
      depth[i] = MAX_BITS;
    used += 1 << (MAX_BITS - depth[i]);
  }
  for (int i = 0; i < n && used > 1 << MAX_BITS; i++) /* the rarest pay first */
    for (; depth[i] < MAX_BITS && used > 1 << MAX_BITS; depth[i]++)
      used -= 1 << (MAX_BITS - depth[i] - 1);
  for (int i = n - 1; i >= 0; i--)
    for (; depth[i] > 1 && used + (1 << (MAX_BITS - depth[i])) <= 1 << MAX_BITS; depth[i]--)
      used += 1 << (MAX_BITS - depth[i]);
  return used == 1 << MAX_BITS;
}

static int make_tree(const uint32_t *count, tree *t)
{
  byte order[SYMBOLS];
  int depth[SYMBOLS], n = sorted(count, order);
  if (n < 2)
    return 0;
  depths(count, order, n, depth);
  if (!limited(depth, n))
    return 0;
  memset(t, 0, sizeof *t);
  t->first = SYMBOLS;
  for (int i = 0; i < n; i++) {
    t->bits[order[i]] = (byte)depth[i];
    if (depth[i] > t->depth)
      t->depth = depth[i];
    if (order[i] > t->last)
      t->last = order[i];
    if (order[i] && order[i] < t->first)
      t->first = order[i];
  }
  unsigned code = 0;
  for (int bits = t->depth; bits > 0; bits--, code >>= 1)
    for (int s = 0; s <= t->last; s++)
      if (t->bits[s] == bits)
        t->code[s] = (uint16_t)code++;
  return 1;
}

static void count_bytes(const byte *data, size_t n, uint32_t counts[STREAMS][SYMBOLS])
{
  size_t i = 0;
  for (; i + STREAMS <= n; i += STREAMS) /* a counter is not ready again at once */
    for (int k = 0; k < STREAMS; k++)
      counts[k][data[i + k]]++;
  for (; i < n; i++)
    counts[0][data[i]]++;
}

typedef struct {
  byte least, greatest;           /* other than 0 */
  int has_zero;
} limits;

/* The exponent of a float that is 0 lies far from all others. */
static WIDEST limits limits_of(const byte *data, size_t n)
{
  byte low = 255, high = 0, lowest = 255;
  for (size_t i = 0; i < n; i++) {
    byte less = (byte)(data[i] - 1);
    low = less < low ? less : low;
    high = data[i] > high ? data[i] : high;
    lowest = data[i] < lowest ? data[i] : lowest;
  }
  limits found = {(byte)(low + 1), high, lowest == 0};
  return found;
}

/* How often each symbol occurs, about; 0 only of those that do not. */
static void count_symbols(const byte *data, size_t n, uint32_t *count, scratch *s)
{
  const limits found = limits_of(data, n);
  int sampled = n > COUNT_ALL_BYTES;
  for (;; sampled = 0) {
    memset(s->counts, 0, sizeof s->counts);
    if (!sampled)
      count_bytes(data, n, s->counts);
    else
      for (size_t at = 0; at + SAMPLE_BYTES <= n; at += SAMPLE_STEP)
        count_bytes(data + at, SAMPLE_BYTES, s->counts);
    int unseen = 0;
    for (int i = 0; i < SYMBOLS; i++) {
      count[i] = s->counts[0][i] + s->counts[1][i] + s->counts[2][i] + s->counts[3][i];
      int may_occur = i ? i >= found.least && i <= found.greatest : found.has_zero;
      if (sampled && !count[i] && may_occur)
        count[i] = 1, unseen++;
    }
    if (unseen <= MAX_UNSEEN)
      return;
  }
}

/* A code and its bits, as `put` wants it. */
static uint64_t entry(unsigned code, unsigned bits)
{
  return (uint64_t)code << (-bits & 63) | bits;
}

static void make_pairs(const tree *t, uint64_t *pairs)
{
  byte found[SYMBOLS];
  int n = 0;
  for (int s = 0; s <= t->last; s++)
    if (t->bits[s])
      found[n++] = (byte)s;
  for (int i = 0; i < n; i++)
    for (int k = 0; k < n; k++) { /* the one that lies behind is coded first */
      byte before = found[k], behind = found[i];
      unsigned code = t->code[behind] | (unsigned)t->code[before] << t->bits[behind];
      pairs[behind << 8 | before] = entry(code, t->bits[behind] + t->bits[before]);
    }
}

typedef struct {
  byte *out;
  uint64_t bits;                  /* the newest at the top; below are those that are stored */
  uint64_t held;                  /* how many are not, modulo 64: the rest of it means nothing */
} stream;

static inline void put(stream *s, uint64_t code)
{
  s->bits = s->bits >> (code & 63) | code; /* its count of bits stays far below those that are held */
  s->held += code;
}

/* At least every 57 bits. */
static inline void store(stream *s)
{
  unsigned held = s->held & 63;
  uint64_t bits = s->bits >> 1 >> (63 - held);
  memcpy(s->out, &bits, sizeof bits); /* little-endian, as compiled.py requires */
  s->out += held >> 3;
  s->held = held & 7;
}

static inline void put_four(stream *s, const byte *four, const uint64_t *pairs)
{
  put(s, pairs[four[2] | four[3] << 8]);
  put(s, pairs[four[0] | four[1] << 8]);
  store(s);
}

/* Where the decoder begins. Returns the length. */
static size_t finish(stream *s, const byte *began)
{
  put(s, entry(1, 1));
  store(s);
  return (size_t)(s->out - began) + (s->held > 0);
}

/* Backwards; returns how many symbols are left, a multiple of those that are coded at once. */
static size_t code_odd(stream *s, const byte *data, size_t n, size_t at_once, const tree *t)
{
  while (n % at_once) {
    byte symbol = data[--n];
    put(s, entry(t->code[symbol], t->bits[symbol]));
    store(s);
  }
  return n;
}

#include "huffman_wide.h"

/* Two at once: while one waits for its bits, the other goes on. */
static void code_two(const byte *data, size_t step, size_t n, const tree *t, scratch *scr, int k,
                     size_t *sizes)
{
  const byte *left = data + k * step, *right = left + step;
  stream a = {scr->streams[k], 0, 0}, b = {scr->streams[k + 1], 0, 0};
  size_t lefts = code_odd(&a, left, step, 4, t), rights = code_odd(&b, right, n, 4, t);
  for (; lefts && rights; lefts -= 4, rights -= 4)
    put_four(&a, left + lefts - 4, scr->pairs), put_four(&b, right + rights - 4, scr->pairs);
  for (; lefts; lefts -= 4)
    put_four(&a, left + lefts - 4, scr->pairs);
  for (; rights; rights -= 4)
    put_four(&b, right + rights - 4, scr->pairs);
  sizes[k] = finish(&a, scr->streams[k]);
  sizes[k + 1] = finish(&b, scr->streams[k + 1]);
}

/* Few bits, stored at once: none too. */
static void put_bits(stream *s, unsigned code, unsigned bits)
{
  if (bits)
    put(s, entry(code, bits)), store(s);
}

static byte *little(byte *out, uint64_t value, int bytes)
{
  for (int i = 0; i < bytes; i++)
    *out++ = (byte)(value >> 8 * i);
  return out;
}

/* Weights are coded by their frequency, in STATES shares of which each that occurs has one. Returns 0
   if only one occurs. */
static int share(const byte *weights, int n, int *shares)
{
  int count[WEIGHTS] = {0}, left = STATES, most = 0;
  for (int i = 0; i < n; i++)
    count[weights[i]]++;
  for (int w = 0; w < WEIGHTS; w++) {
    shares[w] = count[w] ? 1 + count[w] * (STATES - WEIGHTS) / n : 0;
    left -= shares[w];
    most = count[w] > count[most] ? w : most;
  }
  shares[most] += left;
  return shares[most] < STATES;
}

/* The shares, in as few bits as they can have: RFC 8878, 4.1.1. */
static void describe_shares(const int *shares, stream *s)
{
  put_bits(s, STATES_LOG - 5, 4);
  int left = STATES + 1, threshold = STATES, bits = STATES_LOG + 1;
  for (int w = 0; left > 1;) {
    int value = shares[w] + 1, most = 2 * threshold - 1 - left;
    left -= shares[w];
    value += value >= threshold ? most : 0;
    put_bits(s, (unsigned)value, (unsigned)(bits - (value < most)));
    while (left < threshold && threshold > 1)
      bits--, threshold >>= 1;
    if (shares[w++])
      continue;
    int zeros = 0; /* more of them, after the first */
    while (!shares[w])
      w++, zeros++;
    for (; zeros >= 3; zeros -= 3)
      put_bits(s, 3, 2);
    put_bits(s, (unsigned)zeros, 2);
  }
  if (s->held)
    put_bits(s, 0, 8 - (unsigned)s->held);
}

typedef struct {
  byte state[STATES];             /* the next one, less STATES */
  int bits[WEIGHTS], from[WEIGHTS];
} machine;

static void make_machine(const int *shares, machine *m)
{
  byte spread[STATES];
  int at = 0, begin[WEIGHTS], total = 0;
  for (int w = 0; w < WEIGHTS; w++) {
    for (int i = 0; i < shares[w]; i++, at = (at + STATES_STEP) % STATES)
      spread[at] = (byte)w;
    begin[w] = total;
    int log = 0;
    while (shares[w] > 1 << log)
      log++;
    int most = STATES_LOG - log + 1; /* bits that a state gives up, or one less where it is low */
    if (shares[w] == 1)
      m->bits[w] = (STATES_LOG << 16) - STATES;
    else
      m->bits[w] = (most << 16) - (shares[w] << most);
    m->from[w] = total - shares[w];
    total += shares[w];
  }
  for (int u = 0; u < STATES; u++)
    m->state[begin[spread[u]]++] = (byte)u;
}

static unsigned next_state(const machine *m, unsigned value, unsigned bits, int w)
{
  return STATES + m->state[(int)(value >> bits) + m->from[w]];
}

/* Two machines take turns, from the last weight to the first: RFC 8878, 4.2.1.2. */
static void code_weights(const byte *weights, int n, const machine *m, stream *s)
{
  unsigned value[2];
  for (int i = n - 1; i >= 0; i--) {
    int w = weights[i], turn = i & 1;
    if (i >= n - 2) { /* nothing to give up yet */
      unsigned bits = (unsigned)(m->bits[w] + (1 << 15)) >> 16;
      value[turn] = next_state(m, (bits << 16) - (unsigned)m->bits[w], bits, w);
      continue;
    }
    unsigned bits = (value[turn] + (unsigned)m->bits[w]) >> 16;
    put_bits(s, value[turn] & ((1u << bits) - 1), bits);
    value[turn] = next_state(m, value[turn], bits, w);
  }
  put_bits(s, value[1] - STATES, STATES_LOG), put_bits(s, value[0] - STATES, STATES_LOG);
}

/* The weights of all symbols but the last, whose own follows from them. Returns 0 if that takes too
   much; `out` has room for more than fits a tree of 255 weights. */
static size_t describe(const tree *t, byte *out)
{
  byte weights[SYMBOLS + 1];
  for (int s = 0; s <= t->last; s++)
    weights[s] = t->bits[s] ? (byte)(t->depth + 1 - t->bits[s]) : 0;
  weights[t->last] = 0;
  if (t->last <= MAX_PLAIN) {
    out[0] = (byte)(127 + t->last);
    for (int s = 0; s < t->last; s += 2)
      out[1 + s / 2] = (byte)(weights[s] << 4 | weights[s + 1]);
    return 1 + ((size_t)t->last + 1) / 2;
  }
  int shares[WEIGHTS];
  machine m;
  stream s = {out + 1, 0, 0};
  if (!share(weights, t->last, shares))
    return 0;
  describe_shares(shares, &s);
  make_machine(shares, &m);
  code_weights(weights, t->last, &m, &s);
  size_t coded = finish(&s, out + 1);
  out[0] = (byte)coded;
  return coded < DESCRIBED_BYTES ? 1 + coded : 0;
}

/* One block: the codes of its bytes, with the tree or by that of the block before. Returns where it
   ends; NULL if there is no room for it, or too little in it. */
static byte *code_block(const byte *data, size_t n, const tree *t, int is_first, int is_last,
                        byte *out, const byte *end, scratch *scr)
{
  if (n < LEAST_BYTES)
    return NULL;
  size_t step = (n + STREAMS - 1) / STREAMS, sizes[STREAMS], coded = 6;
  if (is_wide(t)) {
    code_wide(data, step, n, t, scr->streams, sizes);
  } else {
    code_two(data, step, step, t, scr, 0, sizes);
    code_two(data, step, n - 3 * step, t, scr, 2, sizes);
  }
  byte described[SYMBOLS * STATES_LOG / 8 + 64];
  size_t described_bytes = is_first ? describe(t, described) : 0;
  if (is_first && !described_bytes)
    return NULL;
  coded += described_bytes;
  for (int k = 0; k < STREAMS; k++)
    coded += sizes[k];
  if (coded + 6 >= n || (size_t)(end - out) < coded + 9)
    return NULL;
  out = little(out, (uint64_t)(coded + 6) << 3 | COMPRESSED << 1 | is_last, BLOCK_HEADER_BYTES);
  out = little(out, (uint64_t)coded << (4 + LONG_BITS) | (uint64_t)n << 4 | LONG_SIZES << 2 |
                    (is_first ? WITH_TREE : AS_BEFORE), LITERALS_HEADER_BYTES);
  memcpy(out, described, described_bytes);
  out += described_bytes;
  for (int k = 0; k < STREAMS - 1; k++)
    out = little(out, sizes[k], 2);
  for (int k = 0; k < STREAMS; k++) {
    memcpy(out, scr->streams[k], sizes[k]);
    out += sizes[k];
  }
  *out++ = 0; /* no sequences */
  return out;
}

/* Write a frame of these bytes. Returns its length; 0 if it is not for this coder, or has no room. */
size_t huffman_frame(const byte *data, size_t n, byte *out, size_t room, void *memory)
{
  scratch *scr = memory;
  byte *const began = out;
  const byte *end = out + room;
  uint32_t count[SYMBOLS];
  tree t;
  if (n < LEAST_BYTES || n > UINT32_MAX || room < FRAME_HEADER_BYTES)
    return 0;
  count_symbols(data, n, count, scr);
  if (!make_tree(count, &t))
    return 0;
  if (!is_wide(&t))
    make_pairs(&t, scr->pairs);
  out = little(out, MAGIC, 4);
  *out++ = DESCRIPTOR;
  out = little(out, n, 4);
  for (size_t at = 0; at < n;) {
    size_t left = n - at, take = left < BLOCK_BYTES ? left : BLOCK_BYTES;
    out = code_block(data + at, take, &t, at == 0, take == left, out, end, scr);
    if (!out)
      return 0;
    at += take;
  }
  return (size_t)(out - began);
}
