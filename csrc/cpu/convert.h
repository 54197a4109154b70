// Loops over one run of elements: shared by pack and cast.
#pragma once

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "formulas.h"

namespace zshard::cpu {

// out[i] = src[i] * scale; scale 1 between equal types copies the bits, as in all of these:
// arithmetic would change a NaN's.
template <typename To, typename From>
void convert_cached(To* out, const From* src, int64_t n, Wide<From> scale) {
    if (std::is_same_v<To, From> && scale == 1)
        return (void)std::memcpy(out, src, n * int64_t{sizeof(To)});
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

// The same. `stream`: out is large, store around the cache.
template <typename To, typename From>
void convert_run(To* out, const From* src, int64_t n, Wide<From> scale, bool stream) {
    if (!stream) return convert_cached(out, src, n, scale);
    if (std::is_same_v<To, From> && scale == 1)
        return stream_copy(out, src, n * int64_t{sizeof(To)});
    convert_streamed(out, src, n, scale);
}

// The same with strides, in elements.
template <typename To, typename From>
void convert_strided(To* out, int64_t out_stride, const From* src, int64_t src_stride, int64_t n,
                     Wide<From> scale) {
    if constexpr (std::is_same_v<To, From>) {
        if (scale == 1) {
            for (int64_t i = 0; i < n; ++i) out[i * out_stride] = src[i * src_stride];
            return;
        }
    }
    for (int64_t i = 0; i < n; ++i)
        out[i * out_stride] = convert_scaled<To>(src[i * src_stride], scale);
}

}  // namespace zshard::cpu
