// csrc/cuda/*.cu on the host, by device/: every op leaves in memory what csrc/cpu/ leaves there, at
// sizes, alignments and dtypes drawn with a fixed seed.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/reduce.cuh"
#include "ops.h"
#include "twins.h"

// What cuda/launch.cu looks for in torch.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t /*device*/, void** stream) {
    *stream = nullptr;
    return 0;
}

namespace zshard {
namespace {

using namespace test;

void check_cast(int round) {
    const auto [to, from] = dtypes_of(round % kCastPairs);
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
// columns. Some pieces are gaps, which unpack_ does not have in its list.
void check_pack(int round, bool pack) {
    const bool wide = one_in(6), copies = one_in(3);  // bits, those of NaNs too
    const Dtype dtype = wide ? Dtype::kFloat64 : dtype_of(round);
    const bool many = round == 0;  // more than one launch takes
    Memory memory;
    std::vector<Twin<void>> sources;
    PackArgs args{nullptr, dtype, 0, copies || one_in(2) ? 1.0 : 0.3, {}};
    for (int64_t count = many ? 800 : draw(0, 12); count > 0; --count) {
        Piece piece{nullptr, wide || copies ? dtype : draw_dtype(), args.numel, draw(1, 40), {}};
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
            sources.push_back(memory.values(room, piece.dtype, copies));
        }
        args.pieces.push_back(piece);
    }
    const Twin<void> flat = memory.values(args.numel, dtype, copies);
    const auto make = [&](int side) {
        args.flat = flat[side];
        for (size_t i = 0; i < sources.size(); ++i) args.pieces[i].data = sources[i][side];
        return args;
    };
    memory.check_same(pack ? cpu::pack : cpu::unpack, pack ? cuda::pack : cuda::unpack, make,
                      where(pack ? "pack" : "unpack", "round", round, "numel", args.numel));
}

// The first round has more blocks than a warp has threads, and squares whose sums are not exact.
void check_reduce(int round) {
    const bool large = round == 0;
    const auto [acc_dtype, other] = dtypes_of((round + kReducePairs - 1) % kReducePairs);
    const bool wide = acc_dtype == Dtype::kFloat64, in_place = !large && one_in(3);
    const Dtype chunk_dtype = in_place ? acc_dtype : other;
    const int64_t numel = large ? 300 * int64_t{kSquareBlock} + 5 : draw_numel();
    const int64_t world_size = in_place || large ? 1 : draw(1, 5);
    const bool accumulate = !in_place && one_in(2), measure = large || !one_in(3);
    Memory memory;
    const Twin<void> acc = memory.numbers(numel, acc_dtype);
    std::array<Rows, 2> chunks = draw_rows(memory, chunk_dtype, world_size, numel);
    for (int side : {0, 1})
        if (in_place) chunks[side].base = acc[side];
    const Twin<double> stats = memory.bits<double>(2);
    // At times one value is infinite, or finite with a square that is not.
    if (numel > 0 && one_in(3)) {
        const int64_t at = draw(0, numel - 1), rank = draw(0, world_size - 1);
        const double value = wide && one_in(2) ? 1e200 : INFINITY;
        for (const Rows& rows : chunks) put(rows, rank, at, value);
    }
    const auto make = [&](int side) {
        return ReduceArgs{.acc = acc[side],
                          .acc_dtype = acc_dtype,
                          .chunks = chunks[side],
                          .numel = numel,
                          .scale = in_place ? 1.0 : 0.3,
                          .accumulate = accumulate,
                          .in_place = in_place,
                          .stats = measure ? stats[side] : nullptr};
    };
    memory.check_same(cpu::reduce, cuda::reduce, make,
                      where("reduce round", round, "numel", numel, "world_size", world_size));
}

// The blocks' sums of a reduction, more of them than the kernel has lanes: as they are documented.
void check_stats(int64_t blocks) {
    std::vector<cuda::Partial> partials(blocks);
    std::vector<double> lanes(kSquareLanes);
    const bool bad = one_in(2);
    for (int64_t b = 0; b < blocks; ++b) {
        const double sum = 1.0 / static_cast<double>(draw(1, 1000));
        partials[b] = {sum, bad && b == blocks / 2};
        lanes[b % kSquareLanes] += sum;
    }
    for (int half = kSquareLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    double stats[2] = {-1.0, -1.0};
    cuda::finish_stats("reduce_", partials.data(), blocks, stats);
    check_equal(stats[0], lanes[0], where("sum of", blocks, "blocks"));
    check_equal(stats[1], bad && blocks > 0 ? 1.0 : 0.0, where("flag of", blocks, "blocks"));
}

void check_clip(int round) {
    const Dtype dtype = one_in(2) ? Dtype::kFloat64 : Dtype::kFloat32;
    Memory memory;
    const Twin<void> factor = memory.numbers(1, dtype), norm = memory.numbers(1, dtype);
    const Twin<void> scale = memory.numbers(1, dtype);
    const bool scaled = one_in(2);
    const Twin<void> squares = memory.numbers(1, Dtype::kFloat64);  // the root of some is a NaN
    const auto make = [&](int side) {
        return ClipArgs{.factor = factor[side],
                        .norm = norm[side],
                        .scale = scaled ? scale[side] : nullptr,
                        .dtype = dtype,
                        .squares = static_cast<const double*>(squares[side]),
                        .max_norm = 0.3};
    };
    memory.check_same(cpu::clip_factor, cuda::clip_factor, make, where("clip_factor round", round));
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

    // The first of the shards has a segment. Twelve rounds have all that a step is compiled for.
    Call(int64_t shards, int64_t round) {
        const int64_t kind = round / 3 % 4;
        args[0].grad_dtype = dtype_of(round);
        args[0].split = kind == 0;
        args[0].has_send = kind >= 2;
        args[0].send_dtype = kind == 2 ? Dtype::kBfloat16 : Dtype::kFloat16;
        args[1] = args[0];
        for (int64_t shard = 0; shard < shards; ++shard)
            add_shard(shard, shards > 100 ? draw(0, 20) : draw_numel() + (shard == 0));
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

    void add_shard(int64_t shard, int64_t numel) {
        const OptimArgs<Rule>& how = args[0];
        const auto master = memory.numbers(numel, how.split ? Dtype::kBfloat16 : Dtype::kFloat32);
        const auto low = memory.bits<int16_t>(how.split ? numel : 0);
        const auto grad = memory.numbers(numel, how.grad_dtype);
        const auto send = memory.bits<Bf16>(how.has_send ? numel : 0);
        OptimShard<Rule> sides[2];
        for (const int side : {0, 1})
            sides[side] = {.master = master[side],
                           .low = how.split ? low[side] : nullptr,
                           .states = {},
                           .grad = grad[side],
                           .send = how.has_send ? send[side] : nullptr,
                           .numel = numel};
        for (int s = 0; s < Rule::kStates; ++s) {
            const auto state = memory.numbers(numel, Dtype::kFloat32, 0.0f);
            for (const int side : {0, 1}) sides[side].states[s] = static_cast<float*>(state[side]);
        }
        for (const int side : {0, 1}) args[side].shards.push_back(sides[side]);
        const int64_t longest = one_in(4) ? 12 : 9000;
        for (int64_t begin = shard == 0 ? 0 : draw(0, numel); begin < numel;) {
            const int64_t end = std::min(numel, begin + draw(0, longest));
            segments.push_back({shard, begin, end});
            hypers.push_back(draw_hyper(Rule{}));
            active.push_back(!one_in(5));
            begin = end + draw(0, longest / 10);
        }
    }
};

template <typename Rule>
void check_optim(const char* op, void (*on_cpu)(const OptimArgs<Rule>&),
                 void (*on_device)(const OptimArgs<Rule>&), int64_t shards, int64_t round) {
    const Call<Rule> call(shards, round);
    call.memory.check_same(
        on_cpu, on_device, [&](int side) { return call.args[side]; },
        where(op, "round", round, "shards", shards, "segments", call.segments.size()));
}

// A shard whose gradient is summed on the way. The segments of a Call's first shard ascend.
struct ReduceCall {
    Call<Adamw> optim;
    Memory memory;
    std::array<Rows, 2> peers;
    Twin<double> stats = memory.bits<double>(2);
    bool measure = !one_in(3);

    explicit ReduceCall(int64_t round) : optim(1, round) {
        if (one_in(8)) {
            std::fill(optim.segments.begin(), optim.segments.end(), Segment{0, 0, 0});
            for (OptimArgs<Adamw>& args : optim.args) args.shards[0].numel = 0;
        }
        peers =
            draw_rows(memory, optim.args[0].grad_dtype, draw(1, 5), optim.args[0].shards[0].numel);
        if (one_in(8))
            for (OptimArgs<Adamw>& args : optim.args) args.rows.num_segments = 0;
    }

    ReduceAdamwArgs args(int side) const {
        return {.optim = optim.args[side],
                .peers = peers[side],
                .scale = 0.3,
                .stats = measure ? stats[side] : nullptr};
    }
};

void check_reduce_adamw(int round) {
    const ReduceCall call(round);
    const auto context =
        where("reduce_adamw round", round, "numel", call.optim.args[0].shards[0].numel, "ranks",
              call.peers[0].count, "segments", call.optim.segments.size());
    call.memory.check_same(
        cpu::reduce_adamw, cuda::reduce_adamw, [&](int side) { return call.args(side); }, context);
    call.optim.memory.compare(context);
}

// What only the device can see of the rows: it stops instead of writing beside a shard.
template <typename Rule>
void check_traps(const std::string& op, void (*on_device)(const OptimArgs<Rule>&)) {
    const auto check_trap = [&](const auto& spoil) {
        Call<Rule> call(2, 0);
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

void check_reduce_adamw_traps() {
    const auto check_trap = [](const std::vector<Segment>& bad) {
        ReduceCall call(0);
        OptimRows<Adamw>& rows = call.optim.args[1].rows;
        rows.active = nullptr;
        call.optim.skip = 0.0f;
        std::vector<int64_t> steps(bad.size());
        const std::vector<Adamw::Hyper> hypers(bad.size(), draw_hyper(Adamw{}));
        rows.num_segments = static_cast<int64_t>(bad.size());
        rows.segments = bad.data();
        rows.hypers = hypers.data();
        rows.steps = steps.data();
        check_throws<std::runtime_error>([&] { cuda::reduce_adamw(call.args(1)); },
                                         "reduce_adamw_: CUDA error");
    };
    check_trap({{1, 0, 1}});
    check_trap({{-1, 0, 1}});
    check_trap({{0, -1, 1}});
    check_trap({{0, 2, 1}});
    check_trap({{0, 0, 1 << 20}});
    check_trap({{0, 1 << 20, (1 << 20) + 1}});
    check_trap({{0, 1, 1}, {0, 0, 1}});
}

}  // namespace
}  // namespace zshard

int main() {
    using namespace zshard;
    for (int round = 0; round < 40; ++round) check_master(round);
    for (int round = 0; round < 80; ++round) check_cast(round);
    for (int round = 0; round < 300; ++round) check_reduce(round);
    for (const int64_t blocks : {0, 1, 1023, 1024, 1025, 4096, 5000, 8192, 8193, 20'001})
        for (int round = 0; round < 3; ++round) check_stats(blocks);
    for (int round = 0; round < 40; ++round) check_clip(round);
    for (int round = 0; round < 160; ++round) check_pack(round / 2, round % 2 == 0);
    for (int round = 0; round < 12; ++round) {
        check_optim("adamw_", cpu::adamw, cuda::adamw, draw(1, 5), round);
        check_optim("sgd_", cpu::sgd, cuda::sgd, draw(1, 5), round);
    }
    for (int round = 0; round < 48; ++round) check_reduce_adamw(round);
    check_optim("sgd_", cpu::sgd, cuda::sgd, 700, 0);  // more than one launch takes
    check_traps("adamw_", cuda::adamw);
    check_traps("sgd_", cuda::sgd);
    check_reduce_adamw_traps();
}
