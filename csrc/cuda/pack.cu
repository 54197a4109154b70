#include <algorithm>

#include "cuda/vector.cuh"
#include "ops.h"

namespace zshard::cuda {

namespace {

template <bool kPack>
constexpr const char* kOp = kPack ? "pack_" : "unpack_";

// A contiguous piece as a kernel sees it; the pieces' tiles are numbered one after another.
struct Item {
    void* data;  // null: zero the flat elements
    int64_t offset;
    int64_t numel;
    int64_t first_tile;
};

// Pieces travel as a kernel argument: no upload, nothing to free, and a CUDA graph keeps its own
// copy.
template <int kCapacity>
struct Table {
    int count;
    int64_t tile;  // elements of one
    int64_t tiles;
    Item items[kCapacity];
};
constexpr int kSmall = 64;
constexpr int kLarge = 1020;  // just below what a kernel's arguments may have

template <bool kPack, typename Flat, typename Value, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    move_kernel(Flat* flat, double scale, const __grid_constant__ Table<kCapacity> table) {
    for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
        const Item& item = table.items[last_not_after(
            table.count, tile, [&](int i) { return table.items[i].first_tile; })];
        const int64_t begin = (tile - item.first_tile) * table.tile;
        const int64_t numel = min(table.tile, item.numel - begin);
        Flat* at = flat + item.offset + begin;
        auto* value = static_cast<Value*>(item.data) + begin;
        if constexpr (!kPack) {
            convert_run(value, at, numel, static_cast<Wide<Flat>>(scale));
        } else if (item.data != nullptr) {
            convert_run(at, value, numel, static_cast<Wide<Value>>(scale));
        } else {
            transform_run(at, at, numel, [](Flat) { return Flat{}; });
        }
    }
}

// One strided piece, element by element: consecutive threads take consecutive flat elements.
template <bool kPack, typename Flat, typename Value>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(Flat* flat, Value* value, int64_t numel, double scale,
                   const __grid_constant__ Strided view) {
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < numel;
         i += gridDim.x * int64_t{kThreads}) {
        int64_t rest = i, position = 0;
        for (int d = view.dims - 1; d > 0; --d) {
            const int64_t quotient = rest / view.sizes[d];
            position += (rest - quotient * view.sizes[d]) * view.strides[d];
            rest = quotient;
        }
        position += rest * view.strides[0];
        if constexpr (std::is_same_v<Flat, Value>) {
            if (scale == 1) {  // bits, as `convert_run` does: arithmetic would change a NaN's
                if constexpr (kPack) {
                    flat[i] = value[position];
                } else {
                    value[position] = flat[i];
                }
                continue;
            }
        }
        if constexpr (kPack) {
            flat[i] = convert_scaled<Flat>(value[position], static_cast<Wide<Value>>(scale));
        } else {
            value[position] = convert_scaled<Value>(flat[i], static_cast<Wide<Flat>>(scale));
        }
    }
}

template <bool kPack, typename Flat, typename Value, int kCapacity>
void launch_table(const PackArgs& args, const std::vector<Item>& items, size_t first,
                  size_t count) {
    Table<kCapacity> table;
    table.count = static_cast<int>(count);
    int64_t numel = 0;
    for (size_t i = 0; i < count; ++i) numel += items[first + i].numel;
    // A block searches for the piece of its tile, which takes as long as to move a few thousand
    // elements: where pieces are small each had better be one tile than a full one and a rest.
    table.tile = kRunTile<Flat, Value>;
    if (numel < 2 * table.tile * table.count) table.tile *= 2;
    table.tiles = 0;
    for (size_t i = 0; i < count; ++i) {
        table.items[i] = items[first + i];
        table.items[i].first_tile = table.tiles;
        table.tiles += tiles_of(table.items[i].numel, table.tile);
    }
    launch(kOp<kPack>, move_kernel<kPack, Flat, Value, kCapacity>, grid_for(table.tiles), kThreads,
           static_cast<Flat*>(args.flat), args.scale, table);
}

template <bool kPack, typename Flat, typename Value>
void launch_strided(const PackArgs& args, const Piece& piece) {
    launch(kOp<kPack>, strided_kernel<kPack, Flat, Value>,
           grid_for((piece.numel + kThreads - 1) / kThreads), kThreads,
           static_cast<Flat*>(args.flat) + piece.offset, static_cast<Value*>(piece.data),
           piece.numel, args.scale, piece.strided);
}

template <bool kPack, typename Flat, typename Value>
void launch_items(const PackArgs& args, const std::vector<Item>& items) {
    for (size_t first = 0; first < items.size(); first += kLarge) {
        const size_t count = std::min<size_t>(kLarge, items.size() - first);
        if (count <= kSmall) {
            launch_table<kPack, Flat, Value, kSmall>(args, items, first, count);
        } else {
            launch_table<kPack, Flat, Value, kLarge>(args, items, first, count);
        }
    }
}

// Calls f for every dtype that a piece beside `Flat` may have, with it and a value of its type.
template <typename Flat, typename F>
void each_dtype(const F& f) {
    if constexpr (std::is_same_v<Flat, double>) {
        f(Dtype::kFloat64, double{});
    } else {
        f(Dtype::kFloat32, float{});
        f(Dtype::kBfloat16, Bf16{});
        f(Dtype::kFloat16, Fp16{});
    }
}

// One launch for each dtype there is among the pieces: a kernel for all would take the registers of
// the most demanding one. Gaps go with the first piece's.
template <bool kPack, typename Flat>
void move_typed(const PackArgs& args) {
    const auto is_contiguous = [](const Piece& piece) {
        return piece.data != nullptr && piece.strided.dims == 0;
    };
    const auto first = std::find_if(args.pieces.begin(), args.pieces.end(), is_contiguous);
    const Dtype of_gaps = first == args.pieces.end() ? args.dtype : first->dtype;
    each_dtype<Flat>([&](Dtype dtype, auto value) {
        using Value = decltype(value);
        std::vector<Item> items;
        for (const Piece& piece : args.pieces) {
            if ((piece.data == nullptr ? of_gaps : piece.dtype) != dtype) continue;
            if (piece.strided.dims == 0) {
                items.push_back({piece.data, piece.offset, piece.numel, 0});
            } else {
                launch_strided<kPack, Flat, Value>(args, piece);
            }
        }
        launch_items<kPack, Flat, Value>(args, items);
    });
}

template <bool kPack>
void move(const PackArgs& args) {
    if (args.dtype == Dtype::kFloat64) return move_typed<kPack, double>(args);
    dispatch(args.dtype, [&](auto flat) { move_typed<kPack, decltype(flat)>(args); });
}

}  // namespace

void pack(const PackArgs& args) { move<true>(args); }
void unpack(const PackArgs& args) { move<false>(args); }

}  // namespace zshard::cuda
