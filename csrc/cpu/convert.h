// Loops over one run of elements: shared by pack and cast.
#pragma once

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "formulas.h"

namespace zshard::cpu {

template <typename To, typename From>
void convert_cached(To* out, const From* src, int64_t n, Wide<From> scale) {
    vectorised(
        [=](auto) { each(0, n, [=](int64_t i) { out[i] = convert_scaled<To>(src[i], scale); }); });
}

template <typename To, typename From>
void convert_streamed(To* out, const From* src, int64_t n, Wide<From> scale) {
    constexpr int64_t kCount = kLine / int64_t{sizeof(To)};
    const int64_t head = std::min(to_next_line(out) / int64_t{sizeof(To)}, n);
    const int64_t tail = head + (n - head) / kCount * kCount;
    convert_cached(out, src, head, scale);
    vectorised([=](auto isa) {
        for (int64_t i = head; i < tail; i += kCount) {
            prefetch<kCount>(src + i);
            alignas(kLine) To line[kCount];
            for (int64_t k = 0; k < kCount; ++k) line[k] = convert_scaled<To>(src[i + k], scale);
            stream_line<isa.value>(out + i, line);
        }
    });
    convert_cached(out + tail, src + tail, n - tail, scale);
}

// out[i] = src[i] * scale. `stream`: out is large, store around the cache.
template <typename To, typename From>
void convert_run(To* out, const From* src, int64_t n, Wide<From> scale, bool stream) {
    if (std::is_same_v<To, From> && scale == 1) {
        const int64_t bytes = n * int64_t{sizeof(To)};
        stream ? stream_copy(out, src, bytes) : (void)std::memcpy(out, src, bytes);
    } else {
        stream ? convert_streamed(out, src, n, scale) : convert_cached(out, src, n, scale);
    }
}

}  // namespace zshard::cpu
