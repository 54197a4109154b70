#include <algorithm>

#include "cpu/convert.h"
#include "layout.h"
#include "ops.h"

namespace zshard::cpu {

namespace {

// Calls f(position, stride, first, count) for each run along the innermost dimension that elements
// [begin, end) of a tensor, counted in row-major order, consist of: `count` elements from
// `position` on, `stride` apart, the first of them number `first` of the tensor.
template <typename F>
void for_runs(const Strided& view, int64_t begin, int64_t end, const F& f) {
    if (begin >= end) return;
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

// out[r * out_rows + c] = src[c * src_rows + r], in squares that stay in the first-level cache:
// plain loops would touch a page an element.
template <typename To, typename From>
void convert_transposed(To* out, int64_t out_rows, const From* src, int64_t src_rows, int64_t rows,
                        int64_t columns, Wide<From> scale) {
    constexpr int64_t kSide = 32;
    From square[kSide][kSide];
    for (int64_t c = 0; c < columns; c += kSide) {
        const int64_t width = std::min(kSide, columns - c);
        for (int64_t r = 0; r < rows; r += kSide) {
            const int64_t height = std::min(kSide, rows - r);
            for (int64_t k = 0; k < width; ++k)
                for (int64_t j = 0; j < height; ++j) square[j][k] = src[(c + k) * src_rows + r + j];
            for (int64_t j = 0; j < height; ++j)
                convert_cached(out + (r + j) * out_rows + c, square[j], width, scale);
        }
    }
}

// The rows of a transposed matrix that lie wholly in its elements [begin, end); none for other
// views.
Range whole_rows(const Strided& view, int64_t begin, int64_t end) {
    if (view.dims != 2 || view.strides[0] != 1) return {0, 0};
    const int64_t columns = view.sizes[1];
    return {(begin + columns - 1) / columns,
            std::max((begin + columns - 1) / columns, end / columns)};
}

// Elements [begin, end) of the piece, into the flat buffer (kPack) or out of it.
template <bool kPack, typename Flat, typename Value>
void move_piece(Flat* flat, const Piece& piece, int64_t begin, int64_t end, double scale,
                bool stream) {
    flat += piece.offset;
    auto* value = static_cast<Value*>(piece.data);
    const Strided& view = piece.strided;
    const auto run = [&](int64_t position, int64_t stride, int64_t first, int64_t count) {
        if constexpr (kPack) {
            const auto factor = static_cast<Wide<Value>>(scale);
            if (stride == 1)
                return convert_run(flat + first, value + position, count, factor, stream);
            convert_strided(flat + first, 1, value + position, stride, count, factor);
        } else {
            const auto factor = static_cast<Wide<Flat>>(scale);
            if (stride == 1)
                return convert_run(value + position, flat + first, count, factor, stream);
            convert_strided(value + position, stride, flat + first, 1, count, factor);
        }
    };
    const Range rows = whole_rows(view, begin, end);
    if (rows.numel() == 0) return for_runs(view, begin, end, run);
    const int64_t columns = view.sizes[1];
    for_runs(view, begin, rows.begin * columns, run);
    Flat* flat_rows = flat + rows.begin * columns;
    if constexpr (kPack) {
        convert_transposed(flat_rows, columns, value + rows.begin, view.strides[1], rows.numel(),
                           columns, static_cast<Wide<Value>>(scale));
    } else {
        convert_transposed(value + rows.begin, view.strides[1], flat_rows, columns, columns,
                           rows.numel(), static_cast<Wide<Flat>>(scale));
    }
    for_runs(view, rows.end * columns, end, run);
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
            dispatch_pair(args.dtype, piece->dtype,
                          [&](auto flat, auto value) { f(flat, value, *piece, begin, end); });
        }
        stream_fence();
    });
}

}  // namespace

void pack(const PackArgs& args) {
    const bool stream = args.numel * size_of(args.dtype) >= kStreamBytes;
    for_pieces(args, [&](auto flat, auto value, const Piece& piece, int64_t begin, int64_t end) {
        using Flat = decltype(flat);
        auto* out = static_cast<Flat*>(args.flat);
        if (piece.data == nullptr) {
            std::fill(out + piece.offset + begin, out + piece.offset + end, Flat{});
            return;
        }
        move_piece<true, Flat, decltype(value)>(out, piece, begin, end, args.scale, stream);
    });
}

void unpack(const PackArgs& args) {
    for_pieces(args, [&](auto flat, auto value, const Piece& piece, int64_t begin, int64_t end) {
        const bool stream = piece.numel * int64_t{sizeof(value)} >= kStreamBytes;
        move_piece<false, decltype(flat), decltype(value)>(static_cast<decltype(flat)*>(args.flat),
                                                           piece, begin, end, args.scale, stream);
    });
}

}  // namespace zshard::cpu
