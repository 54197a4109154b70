// The memory pattern of AdamW without its arithmetic: four arrays read, three of them written.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

extern "C" void four_read_three_write(float* __restrict p, float* __restrict m, float* __restrict v,
                                      const float* __restrict g, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const float x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
    }
}

// Fills 64 bytes at `out`, around the cache where this processor's stores are as wide as its loads.
static void stream_line(void* out, const void* src) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(out), _mm512_loadu_si512(src));
#elif defined(__AVX2__)
    for (int half = 0; half < 2; ++half)
        _mm256_stream_si256(static_cast<__m256i*>(out) + half,
                            _mm256_loadu_si256(static_cast<const __m256i*>(src) + half));
#else
    std::memcpy(out, src, 64);
#endif
}

// The same with a bf16 gradient, and a bf16 copy of p written to s. Threads begin at multiples of
// 32 elements, where s is aligned to cache lines.
extern "C" void four_read_four_write(float* __restrict p, float* __restrict m, float* __restrict v,
                                     const uint16_t* __restrict g, uint16_t* __restrict s,
                                     int64_t begin, int64_t end) {
    alignas(64) uint16_t line[32];
    for (int64_t i = begin; i < end; i += 32) {
        const int64_t count = std::min<int64_t>(32, end - i);
        for (int64_t k = 0; k < count; ++k) {
            const uint32_t wide = uint32_t{g[i + k]} << 16;
            float x;
            std::memcpy(&x, &wide, sizeof(x));
            p[i + k] += x;
            m[i + k] += x;
            v[i + k] += x;
            uint32_t bits;
            std::memcpy(&bits, p + i + k, sizeof(bits));
            line[k] = static_cast<uint16_t>(bits >> 16);
        }
        if (count == 32) {
            stream_line(s + i, line);
        } else {
            std::memcpy(s + i, line, count * sizeof(uint16_t));
        }
    }
}
