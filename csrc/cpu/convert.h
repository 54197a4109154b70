// Loops over one run of elements: shared by pack and cast.
#pragma once

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "formulas.h"

namespace zshard::cpu {

template <typename To, typename From>
void convert_tile(To* out, const From* src, int64_t n, Wide<From> scale) {
    vectorised([=] { each(0, n, [=](int64_t i) { out[i] = convert_scaled<To>(src[i], scale); }); });
}

// out[i] = src[i] * scale. `stream`: out is large, store around the cache.
template <typename To, typename From>
void convert_run(To* out, const From* src, int64_t n, Wide<From> scale, bool stream) {
    const auto copy = [stream](void* to, const void* from, int64_t bytes) {
        stream ? stream_copy(to, from, bytes) : (void)std::memcpy(to, from, bytes);
    };
    if (std::is_same_v<To, From> && scale == 1) return copy(out, src, n * int64_t{sizeof(To)});
    if (!stream) return convert_tile(out, src, n, scale);
    alignas(64) To tile[kTile];
    for (int64_t i = 0; i < n; i += kTile) {
        const int64_t count = std::min(kTile, n - i);
        convert_tile(tile, src + i, count, scale);
        stream_copy(out + i, tile, count * int64_t{sizeof(To)});
    }
}

}  // namespace zshard::cpu
