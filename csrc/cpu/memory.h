// Threads and stores, the two things every CPU launcher needs.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace zshard::cpu {

// Fewest elements worth a thread of their own.
inline constexpr int64_t kGrain = 32768;

// Outputs of at least this many bytes are not read back from the cache, and are stored around it.
// Where nothing else runs a cache of 32 MiB would keep larger ones, but a whole training step took
// 1.05 times as long with 12 MiB here (units of 6 MB; Zen 4).
inline constexpr int64_t kStreamBytes = int64_t{4} << 20;

// Calls f(begin, end) on ranges that cover [0, count), on torch's intra-op threads.
template <typename F>
void parallel(int64_t count, int64_t grain, const F& f) {
    if (count > 0) torch::stable::parallel_for(0, count, grain, f);
}

inline constexpr int64_t kLine = 64;  // bytes of a cache line

// Bytes from p to the next cache line.
inline int64_t to_next_line(const void* p) {
    return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) % kLine);
}

// The prefetchers of Intel's processors stop at each page, and one stream of loads alone stays far
// below the memory's bandwidth: asking for lines this many bytes ahead made the loops here 1.1 to
// 1.9 times faster on arrays larger than the cache (Sapphire Rapids). AMD's do not, and there it
// made AdamW 1.18 times slower (Zen 4).
inline constexpr int64_t kPrefetchBytes = 2048;
#ifdef __x86_64__
extern const bool prefetches;
#else
inline constexpr bool prefetches = false;  // not measured
#endif

// Asks for the lines in which elements [0, kCount) from kPrefetchBytes behind p on lie.
template <int64_t kCount, typename T>
[[gnu::always_inline]] inline void prefetch(const T* p) {
    if (!prefetches) return;
    const auto* ahead = reinterpret_cast<const char*>(p) + kPrefetchBytes;
    for (int64_t b = 0; b < kCount * int64_t{sizeof(T)}; b += kLine) __builtin_prefetch(ahead + b);
}

// [Note: streamed lines] A load is held up where the low 12 bits of its address are those of a
// store under way: it looks like a load of what is being stored. One store that covers the whole
// load is soon found to be another address; where several narrower ones would, the load waits for
// them. With lines in 16-byte stores AdamW took 1.8 times as long where the copy it writes lay 64
// bytes ahead of the gradient, modulo 4 KiB, and packing 2.9 times (Zen 4). So a line is stored by
// the widest stores there are, and no load is wider.
#ifdef __x86_64__
[[ZSHARD_TARGET_V4]] inline void stream_line_v4(void* out, const void* src) {
    _mm512_stream_si512(static_cast<__m512i*>(out), _mm512_loadu_si512(src));
}

[[ZSHARD_TARGET_V3]] inline void stream_line_v3(void* out, const void* src) {
    auto* to = static_cast<__m256i*>(out);
    const auto* from = static_cast<const __m256i*>(src);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
}
#endif

// Fills the cache line at `out` with stores that do not first read it from memory; for loops that
// `vectorised` compiles for kIsa.
template <Isa kIsa>
[[gnu::always_inline]] inline void stream_line(void* out, const void* src) {
#ifdef __x86_64__
    if constexpr (kIsa == Isa::kV4) return stream_line_v4(out, src);
    if constexpr (kIsa == Isa::kV3) return stream_line_v3(out, src);
    auto* to = static_cast<__m128i*>(out);
    const auto* from = static_cast<const __m128i*>(src);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
#else
    std::memcpy(out, src, kLine);
#endif
}

inline void stream_copy(void* out, const void* src, int64_t bytes) {
    auto* to = static_cast<char*>(out);
    const auto* from = static_cast<const char*>(src);
    const int64_t head = std::min(to_next_line(out), bytes);
    std::memcpy(to, from, head);
    const int64_t tail = head + (bytes - head) / kLine * kLine;
    vectorised([=](auto isa) {
        for (int64_t i = head; i < tail; i += kLine) {
            prefetch<kLine>(from + i);
            stream_line<isa.value>(to + i, from + i);
        }
    });
    std::memcpy(to + tail, from + tail, bytes - tail);
}

// Elements that a loop prefetches and stores at a time: whole cache lines in every dtype.
inline constexpr int64_t kStep = 32;

// Moves a step's results to `out`; around the cache where `stream`, which out must be aligned for.
template <Isa kIsa, typename T>
[[gnu::always_inline]] inline void store_step(T* out, const T (&step)[kStep], bool stream) {
    constexpr int64_t kCount = kLine / int64_t{sizeof(T)};
    if (stream) {
        for (int64_t k = 0; k < kStep; k += kCount) stream_line<kIsa>(out + k, step + k);
    } else {
        std::memcpy(out, step, sizeof(step));
    }
}

// Streaming stores become visible to other threads only after a fence.
inline void stream_fence() {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

}  // namespace zshard::cpu
