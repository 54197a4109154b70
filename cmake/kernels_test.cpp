// csrc/cuda/*.cu on the host, by device/: every op leaves in memory what csrc/cpu/ leaves there, at
// sizes, alignments and dtypes drawn with a fixed seed. Each array is an allocation of its own, so
// that ASan sees an access beyond it, and is compared whole.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "ops.h"

// What cuda/launch.cu looks for in torch.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t /*device*/, void** stream) {
    *stream = nullptr;
    return 0;
}

namespace zshard {
namespace {

using test::check_equal;
using test::check_throws;
using test::where;

std::mt19937_64 generator;

int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

bool one_in(int64_t n) { return draw(1, n) == 1; }

// Around the places where tiles, blocks and vectors end, and others.
int64_t draw_numel() {
    const int64_t sizes[] = {0, 1, 3, 8, 255, 1024, 4095, 4096, 4097, 8191, 8193, draw(0, 20'000)};
    return sizes[draw(0, std::size(sizes) - 1)];
}

Dtype draw_dtype() {
    constexpr Dtype kAll[] = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
    return kAll[draw(0, 2)];
}

// The same array twice: for the CPU and for the kernels.
template <typename T>
using Twin = std::array<T*, 2>;

class Memory {
 public:
    // Random bits, at times not at a multiple of 16 bytes.
    template <typename T>
    Twin<T> bits(int64_t numel) {
        const Twin<char> twin = add(numel * int64_t{sizeof(T)}, sizeof(T));
        return {reinterpret_cast<T*>(twin[0]), reinterpret_cast<T*>(twin[1])};
    }

    // Numbers in [low, 1): no NaN, whose bits are left open.
    Twin<void> numbers(int64_t numel, Dtype dtype, float low = -1.0f) {
        const Twin<char> twin = add(numel * size_of(dtype), size_of(dtype));
        std::uniform_real_distribution<float> value(low, 1.0f);
        const auto fill = [&](auto* data) {
            for (int64_t i = 0; i < numel; ++i)
                data[i] = convert<std::remove_pointer_t<decltype(data)>>(value(generator));
        };
        if (dtype == Dtype::kFloat64) {
            fill(reinterpret_cast<double*>(twin[0]));
        } else {
            dispatch(dtype, [&](auto type) { fill(reinterpret_cast<decltype(type)*>(twin[0])); });
        }
        std::memcpy(twin[1], twin[0], numel * size_of(dtype));
        return {twin[0], twin[1]};
    }

    // Both sides of an op, on the arguments that make(side) gives.
    template <typename Args, typename Make, typename Context>
    void check_same(void (*on_cpu)(const Args&), void (*on_device)(const Args&), const Make& make,
                    const Context& context) const {
        on_cpu(make(0));
        on_device(make(1));
        for (const Array& array : arrays_)
            for (int64_t i = 0; i < array.bytes; ++i)
                check_equal(int{array.data[1][i]}, int{array.data[0][i]}, [&](auto& out) {
                    context(out);
                    out << "array " << &array - arrays_.data() << " byte " << i - array.shift;
                });
    }

 private:
    struct Array {
        int64_t bytes, shift;
        std::unique_ptr<char[]> data[2];
    };

    Twin<char> add(int64_t bytes, int64_t alignment) {
        const int64_t shift = one_in(2) ? 0 : draw(0, 15) * alignment;
        Array array{.bytes = bytes + shift, .shift = shift, .data = {}};
        for (auto& data : array.data) data = std::make_unique<char[]>(array.bytes);
        for (int64_t i = 0; i < array.bytes; ++i)
            array.data[0][i] = array.data[1][i] = static_cast<char>(generator());
        arrays_.push_back(std::move(array));
        const auto& data = arrays_.back().data;
        return {data[0].get() + shift, data[1].get() + shift};
    }

    std::vector<Array> arrays_;
};

// For both sides: rows of one array, or arrays of their own.
std::array<Rows, 2> draw_rows(Memory& memory, Dtype dtype, int64_t count, int64_t numel) {
    const bool apart = one_in(2);
    // Rows of a flat buffer are aligned alike; others take another path.
    const int64_t stride = one_in(2) ? (numel + 3) / 4 * 4 : numel + draw(0, 9);
    std::array<Rows, 2> rows{};
    const Twin<void> base = memory.numbers(apart ? 0 : (count - 1) * stride + numel, dtype);
    for (const int side : {0, 1})
        rows[side] = {dtype, count, apart ? nullptr : base[side], stride, {}};
    for (int64_t rank = 0; apart && rank < count; ++rank) {
        const Twin<void> peer = memory.numbers(numel, dtype);
        for (const int side : {0, 1}) rows[side].peers[rank] = peer[side];
    }
    return rows;
}

void check_cast(int round) {
    const bool wide = one_in(5);
    const Dtype to = wide ? Dtype::kFloat64 : draw_dtype();
    const Dtype from = wide ? Dtype::kFloat32 : draw_dtype();
    const int64_t numel = draw_numel(), count = draw(1, 5);
    Memory memory;
    const Twin<void> out = memory.numbers(count * numel, to);
    std::array<Rows, 2> src = draw_rows(memory, from, count, numel);
    const int64_t in_place = draw(0, count);  // the last: none
    if (in_place < count)
        for (Rows& rows : src) rows.peers[in_place] = nullptr;
    memory.check_same(
        cpu::cast, cuda::cast, [&](int side) { return CastArgs{out[side], to, src[side], numel}; },
        where("cast round", round, "rows", count, "numel", numel));
}

void check_master(int round) {
    const int64_t numel = draw_numel();
    Memory memory;
    const auto full = memory.bits<float>(numel);
    const auto hi = memory.bits<Bf16>(numel);
    const auto lo = memory.bits<int16_t>(numel);
    const auto make = [&](int side) { return MasterArgs{full[side], hi[side], lo[side], numel}; };
    const auto at = where("split or join round", round, "numel", numel);
    if (one_in(2)) {
        memory.check_same(cpu::split_master, cuda::split_master, make, at);
    } else {
        memory.check_same(cpu::join_master, cuda::join_master, make, at);
    }
}

// pack_ and unpack_ of contiguous tensors and of transposed matrices with room between their
// columns. Some pieces are gaps, which unpack_ has not in its list.
void check_pack(int round, bool pack) {
    const bool wide = one_in(6);
    const Dtype dtype = wide ? Dtype::kFloat64 : draw_dtype();
    const bool many = round == 0;  // more than one launch takes
    Memory memory;
    std::vector<Twin<void>> sources;
    PackArgs args{nullptr, dtype, 0, one_in(2) ? 1.0 : 0.3, {}};
    for (int64_t count = many ? 800 : draw(0, 12); count > 0; --count) {
        Piece piece{nullptr, wide ? dtype : draw_dtype(), args.numel, draw(1, 40), {}};
        int64_t room = piece.numel;
        if (!many && one_in(4)) {
            const int64_t rows = draw(2, 90), columns = draw(2, 90), pitch = rows + draw(0, 3);
            piece.numel = rows * columns;
            piece.strided = {.dims = 2, .sizes = {rows, columns}, .strides = {1, pitch}};
            room = columns * pitch;
        } else if (!many) {
            room = piece.numel = std::max<int64_t>(draw_numel(), 1);
        }
        args.numel += piece.numel;
        if (one_in(3)) {
            if (!pack) continue;
            piece = {nullptr, dtype, piece.offset, piece.numel, {}};
            sources.push_back({nullptr, nullptr});
        } else {
            sources.push_back(memory.numbers(room, piece.dtype));
        }
        args.pieces.push_back(piece);
    }
    const Twin<void> flat = memory.numbers(args.numel, dtype);
    const auto make = [&](int side) {
        args.flat = flat[side];
        for (size_t i = 0; i < sources.size(); ++i) args.pieces[i].data = sources[i][side];
        return args;
    };
    memory.check_same(pack ? cpu::pack : cpu::unpack, pack ? cuda::pack : cuda::unpack, make,
                      where(pack ? "pack" : "unpack", "round", round, "numel", args.numel));
}

void check_reduce(int round) {
    const bool wide = one_in(6);
    const Dtype acc_dtype = wide ? Dtype::kFloat64 : draw_dtype();
    const Dtype chunk_dtype = wide ? Dtype::kFloat64 : draw_dtype();
    const int64_t numel = draw_numel(), world_size = draw(1, 5);
    const bool accumulate = one_in(2), measure = !one_in(3);
    Memory memory;
    const Twin<void> acc = memory.numbers(numel, acc_dtype);
    const std::array<Rows, 2> chunks = draw_rows(memory, chunk_dtype, world_size, numel);
    const Twin<double> stats = memory.bits<double>(2);
    const auto make = [&](int side) {
        return ReduceArgs{.acc = acc[side],
                          .acc_dtype = acc_dtype,
                          .chunks = chunks[side],
                          .numel = numel,
                          .scale = 0.3,
                          .accumulate = accumulate,
                          .stats = measure ? stats[side] : nullptr};
    };
    memory.check_same(cpu::reduce, cuda::reduce, make,
                      where("reduce round", round, "numel", numel, "world_size", world_size));
}

Adamw::Hyper draw_hyper(Adamw) { return {1e-3, 0.9, 0.999, 1e-8, 0.1, one_in(2) ? 1.0 : 0.0}; }

Sgd::Hyper draw_hyper(Sgd) {
    return {1e-2, one_in(3) ? 0.0 : 0.9, 0.1, 0.1, one_in(2) ? 1.0 : 0.0, one_in(2) ? 1.0 : 0.0};
}

// An optimizer's call: shards in segments with gaps between them.
template <typename Rule>
struct Call {
    Memory memory;
    OptimArgs<Rule> args[2];
    std::vector<Segment> segments;
    std::vector<typename Rule::Hyper> hypers;
    std::vector<uint8_t> active;
    float scale = 0.7f, skip = one_in(10) ? 1.0f : 0.0f;

    // `units`: shards. There is a segment in the first one.
    explicit Call(int64_t units) {
        args[0].grad_dtype = draw_dtype();
        args[0].split = one_in(3);
        args[0].has_send = !args[0].split && one_in(2);
        args[0].send_dtype = one_in(2) ? Dtype::kBfloat16 : Dtype::kFloat16;
        args[1] = args[0];
        for (int64_t unit = 0; unit < units; ++unit)
            add_shard(unit, units > 100 ? draw(0, 20) : draw_numel() + (unit == 0));
        segments.shrink_to_fit();
        hypers.shrink_to_fit();
        active.shrink_to_fit();
        const auto rows = static_cast<int64_t>(segments.size());
        const auto steps = memory.bits<int64_t>(rows);
        for (int64_t g = 0; g < rows; ++g) steps[0][g] = steps[1][g] = g % 3 * 50;
        const bool scaled = one_in(2), all = one_in(4);
        for (const int side : {0, 1})
            args[side].rows = {.num_segments = rows,
                               .segments = segments.data(),
                               .hypers = hypers.data(),
                               .steps = steps[side],
                               .active = all ? nullptr : active.data(),
                               .grad_scale = scaled ? &scale : nullptr,
                               .skip = &skip};
    }

    void add_shard(int64_t unit, int64_t numel) {
        const OptimArgs<Rule>& how = args[0];
        const auto master = memory.numbers(numel, how.split ? Dtype::kBfloat16 : Dtype::kFloat32);
        const auto low = memory.bits<int16_t>(how.split ? numel : 0);
        const auto grad = memory.numbers(numel, how.grad_dtype);
        const auto send = memory.bits<Bf16>(how.has_send ? numel : 0);
        OptimShard<Rule> shards[2];
        for (const int side : {0, 1})
            shards[side] = {.master = master[side],
                            .low = how.split ? low[side] : nullptr,
                            .states = {},
                            .grad = grad[side],
                            .send = how.has_send ? send[side] : nullptr,
                            .numel = numel};
        for (int s = 0; s < Rule::kStates; ++s) {
            const auto state = memory.numbers(numel, Dtype::kFloat32, 0.0f);
            for (const int side : {0, 1}) shards[side].states[s] = static_cast<float*>(state[side]);
        }
        for (const int side : {0, 1}) args[side].shards.push_back(shards[side]);
        const int64_t longest = one_in(4) ? 12 : 9000;
        for (int64_t begin = unit == 0 ? 0 : draw(0, numel); begin < numel;) {
            const int64_t end = std::min(numel, begin + draw(0, longest));
            segments.push_back({unit, begin, end});
            hypers.push_back(draw_hyper(Rule{}));
            active.push_back(!one_in(5));
            begin = end + draw(0, longest / 10);
        }
    }
};

template <typename Rule>
void check_optim(const char* op, void (*on_cpu)(const OptimArgs<Rule>&),
                 void (*on_device)(const OptimArgs<Rule>&), int64_t units) {
    const Call<Rule> call(units);
    call.memory.check_same(
        on_cpu, on_device, [&](int side) { return call.args[side]; },
        where(op, "shards", units, "segments", call.segments.size()));
}

// What only the device can see of the rows: it stops instead of writing beside a shard.
template <typename Rule>
void check_traps(const std::string& op, void (*on_device)(const OptimArgs<Rule>&)) {
    const auto check_trap = [&](const auto& spoil) {
        Call<Rule> call(2);
        call.active[0] = 1;
        call.skip = 0.0f;
        spoil(call);
        check_throws<std::runtime_error>([&] { on_device(call.args[1]); }, op + ": CUDA error");
    };
    for (const Segment bad : {Segment{2, 0, 1}, Segment{-1, 0, 1}, Segment{0, -1, 1},
                              Segment{0, 2, 1}, Segment{0, 0, 1 << 20}})
        check_trap([&](Call<Rule>& call) { call.segments[0] = bad; });
    if constexpr (std::is_same_v<Rule, Sgd>)
        check_trap([](Call<Rule>& call) {
            call.segments[0] = {0, 0, 1};
            call.hypers[0].momentum = 0.9;
            call.args[1].shards[0].states[0] = nullptr;
        });
}

}  // namespace
}  // namespace zshard

int main() {
    using namespace zshard;
    for (int round = 0; round < 40; ++round) check_master(round);
    for (int round = 0; round < 80; ++round) check_cast(round);
    for (int round = 0; round < 150; ++round) check_reduce(round);
    for (int round = 0; round < 8; ++round) {
        check_pack(round, true);
        check_pack(round, false);
        check_optim("adamw_", cpu::adamw, cuda::adamw, draw(1, 5));
        check_optim("sgd_", cpu::sgd, cuda::sgd, draw(1, 5));
    }
    check_optim("sgd_", cpu::sgd, cuda::sgd, 700);  // more than one launch takes
    check_traps("adamw_", cuda::adamw);
    check_traps("sgd_", cuda::sgd);
}
