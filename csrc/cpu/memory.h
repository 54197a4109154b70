// Threads and stores, the two things every CPU launcher needs.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

namespace zshard::cpu {

// Fewest elements worth a thread of their own.
inline constexpr int64_t kGrain = 32768;

// Elements that a thread converts in its first-level cache before it streams them out.
inline constexpr int64_t kTile = 4096;

// Outputs of at least this many bytes are not read back from the cache, and are stored around it.
inline constexpr int64_t kStreamBytes = int64_t{4} << 20;

// Calls f(begin, end) on ranges that cover [0, count), on torch's intra-op threads.
template <typename F>
void parallel(int64_t count, int64_t grain, const F& f) {
    if (count > 0) torch::stable::parallel_for(0, count, grain, f);
}

// Copies bytes with stores that do not first read the destination's cache lines: a third less
// traffic.
inline void stream_copy(void* out, const void* src, int64_t bytes) {
#ifdef __x86_64__
    auto* to = static_cast<char*>(out);
    const auto* from = static_cast<const char*>(src);
    int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
    head = head < bytes ? head : bytes;
    std::memcpy(to, from, head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64) {
        const auto* line = reinterpret_cast<const __m128i*>(from + i);
        const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
        const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
        auto* place = reinterpret_cast<__m128i*>(to + i);
        _mm_stream_si128(place, a);
        _mm_stream_si128(place + 1, b);
        _mm_stream_si128(place + 2, c);
        _mm_stream_si128(place + 3, d);
    }
    std::memcpy(to + i, from + i, bytes - i);
#else
    std::memcpy(out, src, bytes);
#endif
}

// Streaming stores become visible to other threads only after a fence.
inline void stream_fence() {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

}  // namespace zshard::cpu
