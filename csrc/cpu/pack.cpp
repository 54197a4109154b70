#include <algorithm>

#include "cpu/convert.h"
#include "ops.h"

namespace zshard::cpu {

namespace {

// Calls f(position, stride, first, count) for each run along the innermost dimension that elements
// [begin, end) of a tensor, counted in row-major order, consist of: `count` elements from
// `position` on, `stride` apart, the first of them number `first` of the tensor.
template <typename F>
void for_runs(const Strided& view, int64_t begin, int64_t end, const F& f) {
    if (view.dims == 0) return f(begin, 1, begin, end - begin);
    const int last = view.dims - 1;
    int64_t index[kMaxDims];
    int64_t rest = begin, position = 0;
    for (int d = last; d >= 0; --d) {
        index[d] = rest % view.sizes[d];
        rest /= view.sizes[d];
        position += index[d] * view.strides[d];
    }
    for (int64_t first = begin; first < end;) {
        const int64_t count = std::min(view.sizes[last] - index[last], end - first);
        f(position, view.strides[last], first, count);
        first += count;
        position += count * view.strides[last];
        index[last] += count;
        for (int d = last; d > 0 && index[d] == view.sizes[d]; --d) {
            position += view.strides[d - 1] - view.sizes[d] * view.strides[d];
            index[d] = 0;
            ++index[d - 1];
        }
    }
}

// Elements [begin, end) of the piece, into the flat buffer.
template <typename To, typename From>
void pack_piece(To* flat, const Piece& piece, int64_t begin, int64_t end, Wide<From> scale,
                bool stream) {
    const auto* src = static_cast<const From*>(piece.data);
    for_runs(piece.strided, begin, end,
             [&](int64_t position, int64_t stride, int64_t first, int64_t count) {
                 const From* from = src + position;
                 To* to = flat + piece.offset + first;
                 if (stride == 1) return convert_run(to, from, count, scale, stream);
                 for (int64_t i = 0; i < count; ++i)
                     to[i] = convert_scaled<To>(from[i * stride], scale);
             });
}

// Elements [begin, end) of the piece, from the flat buffer.
template <typename To, typename From>
void unpack_piece(const From* flat, const Piece& piece, int64_t begin, int64_t end,
                  Wide<From> scale, bool stream) {
    auto* out = static_cast<To*>(piece.data);
    for_runs(piece.strided, begin, end,
             [&](int64_t position, int64_t stride, int64_t first, int64_t count) {
                 const From* from = flat + piece.offset + first;
                 To* to = out + position;
                 if (stride == 1) return convert_run(to, from, count, scale, stream);
                 for (int64_t i = 0; i < count; ++i)
                     to[i * stride] = convert_scaled<To>(from[i], scale);
             });
}

// Calls f(flat value, piece value, piece, begin, end) for the elements of each piece that lie in
// the flat range a thread has, the values being of the C++ types that store the two.
template <typename F>
void for_pieces(const PackArgs& args, const F& f) {
    parallel(args.numel, kGrain, [&](int64_t low, int64_t high) {
        const auto starts_after = [](int64_t at, const Piece& piece) { return at < piece.offset; };
        auto piece = std::upper_bound(args.pieces.begin(), args.pieces.end(), low, starts_after);
        if (piece != args.pieces.begin()) --piece;
        for (; piece != args.pieces.end() && piece->offset < high; ++piece) {
            const int64_t begin = std::max<int64_t>(low - piece->offset, 0);
            const int64_t end = std::min(high - piece->offset, piece->numel);
            if (begin >= end) continue;
            if (args.dtype == Dtype::kFloat64) {
                f(double{}, double{}, *piece, begin, end);
                continue;
            }
            dispatch(args.dtype, [&](auto flat) {
                dispatch(piece->dtype, [&](auto value) { f(flat, value, *piece, begin, end); });
            });
        }
        stream_fence();
    });
}

}  // namespace

void pack(const PackArgs& args) {
    const bool stream = args.numel * size_of(args.dtype) >= kStreamBytes;
    for_pieces(args, [&](auto to, auto from, const Piece& piece, int64_t begin, int64_t end) {
        using To = decltype(to);
        using From = decltype(from);
        auto* flat = static_cast<To*>(args.flat);
        if (piece.data == nullptr) {
            std::fill(flat + piece.offset + begin, flat + piece.offset + end, To{});
            return;
        }
        pack_piece<To, From>(flat, piece, begin, end, static_cast<Wide<From>>(args.scale), stream);
    });
}

void unpack(const PackArgs& args) {
    for_pieces(args, [&](auto from, auto to, const Piece& piece, int64_t begin, int64_t end) {
        using To = decltype(to);
        using From = decltype(from);
        const bool stream = piece.numel * int64_t{sizeof(To)} >= kStreamBytes;
        const auto* flat = static_cast<const From*>(args.flat);
        unpack_piece<To, From>(flat, piece, begin, end, static_cast<Wide<From>>(args.scale),
                               stream);
    });
}

}  // namespace zshard::cpu
