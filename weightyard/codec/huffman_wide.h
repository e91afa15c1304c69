/* Huffman codes of 32 bytes at once, where the processor has AVX-512: for huffman.c.

   The table is in registers, so there is one only for symbols that lie close together, as exponents
   do; that of 0, which lies far from the others, has a register of its own. Neighbours are joined three times, as if they were one symbol with a longer code. A test that
   defines NARROW has the other way on every machine. */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(NARROW)
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,bmi2")))

enum { AT_ONCE = 32, SPAN = 64, JOINED_BITS = 56 }; /* and 7 that wait, in one store */

typedef struct {
  __m512i first, codes[2], zero;  /* 16 bits each: the code, and above it how many bits it has */
} wide_table;

static int is_wide(const tree *t)
{
  return t->last - t->first < SPAN && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("bmi2");
}

static uint16_t wide_code(const tree *t, int symbol)
{
  return (uint16_t)(t->bits[symbol] << 12 | t->code[symbol]);
}

static WIDE wide_table make_wide(const tree *t)
{
  uint16_t codes[SPAN] = {0};
  for (int s = t->first; s <= t->last; s++)
    codes[s - t->first] = wide_code(t, s);
  wide_table w = {_mm512_set1_epi16((short)t->first),
                  {_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + SPAN / 2)},
                  _mm512_set1_epi16((short)wide_code(t, 0))};
  return w;
}

/* As a `stream`, but those that wait lie at the bottom. */
typedef struct {
  byte *out;
  uint64_t bits, held;
} wide_stream;

static inline WIDE void put_joined(wide_stream *s, uint64_t code, uint64_t bits)
{
  s->bits |= code << s->held;
  memcpy(s->out, &s->bits, sizeof s->bits);
  s->held += bits;
  s->out += s->held >> 3;
  s->bits >>= s->held & ~7ull & 63;
  s->held &= 7;
}

static inline WIDE void put_32(wide_stream *s, const byte *data, const wide_table *t)
{
  const __m512i ones = _mm512_set1_epi16(1), low = _mm512_set1_epi64(UINT32_MAX);
  __m512i symbols = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)data));
  __m512i found = _mm512_permutex2var_epi16(t->codes[0], _mm512_sub_epi16(symbols, t->first),
                                            t->codes[1]);
  found = _mm512_mask_mov_epi16(found, _mm512_testn_epi16_mask(symbols, symbols), t->zero);
  __m512i bits = _mm512_srli_epi16(found, 12);
  __m512i code = _mm512_and_si512(found, _mm512_set1_epi16(0xFFF));

  /* Of two neighbours the one that lies behind is coded first, so its bits are the lower ones. */
  __m512i behind = _mm512_srli_epi32(bits, 16);
  code = _mm512_madd_epi16(code, _mm512_sllv_epi16(ones, behind));
  bits = _mm512_madd_epi16(bits, ones);

  behind = _mm512_srli_epi64(bits, 32);
  code = _mm512_or_si512(_mm512_sllv_epi64(_mm512_and_si512(code, low), behind),
                         _mm512_srli_epi64(code, 32));
  bits = _mm512_add_epi64(_mm512_and_si512(bits, low), behind);

  uint64_t codes[8], lengths[8];
  behind = _mm512_bsrli_epi128(bits, 8);
  __m512i both = _mm512_add_epi64(bits, behind);
  if (__builtin_expect(_mm512_cmpgt_epu64_mask(both, _mm512_set1_epi64(JOINED_BITS)) & 0x55, 0)) {
    _mm512_storeu_si512(codes, code), _mm512_storeu_si512(lengths, bits);
    for (int i = 7; i >= 0; i--)
      put_joined(s, codes[i], lengths[i]);
    return;
  }
  code = _mm512_or_si512(_mm512_sllv_epi64(code, behind), _mm512_bsrli_epi128(code, 8));
  _mm512_storeu_si512(codes, code), _mm512_storeu_si512(lengths, both);
  for (int i = 6; i >= 0; i -= 2)
    put_joined(s, codes[i], lengths[i]);
}

/* All streams by turns: while one waits for its bits, the others go on. */
static WIDE void code_wide(const byte *data, size_t step, size_t n, const tree *t,
                           byte streams[STREAMS][STREAM_BYTES], size_t *sizes)
{
  const wide_table table = make_wide(t);
  const size_t shortest = (n - (STREAMS - 1) * step) / AT_ONCE * AT_ONCE;
  wide_stream w[STREAMS];
  for (int k = 0; k < STREAMS; k++) {
    const byte *begin = data + (size_t)k * step;
    stream s = {streams[k], 0, 0};
    size_t left = code_odd(&s, begin, k < STREAMS - 1 ? step : n - k * step, AT_ONCE, t);
    w[k] = (wide_stream){s.out, s.bits >> 1 >> (63 - s.held), s.held};
    for (; left > shortest; left -= AT_ONCE)
      put_32(&w[k], begin + left - AT_ONCE, &table);
  }
  wide_stream a = w[0], b = w[1], c = w[2], d = w[3]; /* in registers */
  for (const byte *end = data + shortest; end > data; end -= AT_ONCE) {
    put_32(&a, end - AT_ONCE, &table), put_32(&b, end + step - AT_ONCE, &table);
    put_32(&c, end + 2 * step - AT_ONCE, &table), put_32(&d, end + 3 * step - AT_ONCE, &table);
  }
  w[0] = a, w[1] = b, w[2] = c, w[3] = d;
  for (int k = 0; k < STREAMS; k++) {
    stream s = {w[k].out, w[k].bits << 1 << (63 - w[k].held), w[k].held};
    sizes[k] = finish(&s, streams[k]);
  }
}

#else
static int is_wide(const tree *t) { (void)t; return 0; }
static void code_wide(const byte *data, size_t step, size_t n, const tree *t,
                      byte streams[STREAMS][STREAM_BYTES], size_t *sizes)
{
  (void)data, (void)step, (void)n, (void)t, (void)streams, (void)sizes;
}
#endif
