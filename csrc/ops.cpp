// The door of every op: schema, checks, and the launcher of the tensors' device behind them.
#include "ops.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "checks.h"
#include "cpu/isa.h"
#include "optim_args.h"

namespace zshard {

namespace {

constexpr bool kWithCuda = ZSHARD_WITH_CUDA != 0;

template <auto kCpu, auto kCuda, typename Args>
void launch(const Checks& check, const Tensor& on, const Args& args) {
    if (on.is_cpu()) {
        cpu::resolve_isa();
        return kCpu(args);
    }
    if constexpr (kWithCuda) {
        const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
        kCuda(args);
    } else {
        check.fail("the tensors are on ", device_of(on),
                   ", but zshard was built without CUDA: build it again with ZSHARD_CUDA=1");
    }
}

// The pieces of pack_ (a tensor list into out) and unpack_ (flat into a tensor list).
PackArgs pack_args(const Checks& check, const char* flat_name, const Tensor& flat,
                   const char* list_name, const Tensors& tensors,
                   const std::vector<int64_t>& offsets, double scale, bool zero_gaps) {
    check.flat(flat_name, flat);
    PackArgs args{.flat = flat.data_ptr(),
                  .dtype = check.dtype(flat_name, flat),
                  .numel = flat.numel(),
                  .scale = scale,
                  .pieces = {}};
    check.require(tensors.size() == offsets.size(), list_name, " has ", tensors.size(),
                  " entries but offsets has ", offsets.size(), ": give one offset for each");
    args.pieces.reserve(tensors.size() * (zero_gaps ? 2 : 1) + 1);
    int64_t end = 0;
    const auto zero_until = [&](int64_t offset) {
        if (zero_gaps && offset > end)
            args.pieces.push_back({nullptr, args.dtype, end, offset - end, {}});
    };
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& t = tensors[i];
        const std::pair name{list_name, i};
        check.same_device(name, t);
        const int64_t numel = t.numel();
        const Dtype dtype = check.dtype(name, t);
        if ((dtype == Dtype::kFloat64) != (args.dtype == Dtype::kFloat64))
            check.fail(list_name, "[", i, "] is ", describe(t), " but ", flat_name, " is ",
                       describe(flat),
                       ": float64 goes only with float64, keep it in a flat buffer of its own");
        if (offsets[i] < end || offsets[i] > args.numel - numel)
            check.fail(list_name, "[", i, "] has ", numel, " elements and offset ", offsets[i],
                       ", which ",
                       offsets[i] < end
                           ? text("lies before the end of the entry before it, ", end)
                           : text("passes the end of ", flat_name, ", ", args.numel, " elements"),
                       ": offsets must ascend and leave room for every entry");
        const std::optional<Strided> view = merge_dims(t);
        if (!view)
            check.fail(list_name, "[", i, "] is ", describe(t),
                       ": too many dimensions to walk, pass t.contiguous()");
        if (numel == 0) continue;
        void* data = t.data_ptr();
        if (share_memory(data, extent(*view, numel) * size_of(dtype), args.flat,
                         args.numel * size_of(args.dtype)))
            check.fail(list_name, "[", i, "] and ", flat_name, " share memory: pass a copy of one");
        if (!zero_gaps) check.aligned(name, t);
        if (!zero_gaps && may_overlap(*view))
            check.fail(
                list_name, "[", i, "] is ", describe(t),
                ": several of its elements may lie in one place, write into a copy without that");
        zero_until(offsets[i]);
        args.pieces.push_back({data, dtype, offsets[i], numel, *view});
        end = offsets[i] + numel;
    }
    zero_until(args.numel);
    return args;
}

void pack_(const Tensor& out, const Tensors& sources, const std::vector<int64_t>& offsets,
           double scale) {
    const Checks check("pack_", out);
    const PackArgs args = pack_args(check, "out", out, "sources", sources, offsets, scale, true);
    launch<cpu::pack, cuda::pack>(check, out, args);
}

void unpack_(const Tensors& targets, const Tensor& flat, const std::vector<int64_t>& offsets,
             double scale) {
    const Checks check("unpack_", flat);
    const PackArgs args = pack_args(check, "flat", flat, "targets", targets, offsets, scale, false);
    launch<cpu::unpack, cuda::unpack>(check, flat, args);
}

void require_castable(const Checks& check, const char* out_name, const Tensor& out, Dtype to,
                      const char* src_name, const Tensor& src, Dtype from) {
    const bool wide = to == Dtype::kFloat64 || from == Dtype::kFloat64;
    if (wide && (size_of(to) == 2 || size_of(from) == 2))
        check.fail(out_name, " is ", describe(out), " and ", src_name, " is ", describe(src),
                   ": float64 is cast only from and to float32, go through float32");
}

void cast_(const Tensor& out, const Tensor& src) {
    const Checks check("cast_", out);
    check.flat("out", out);
    check.flat("src", src);
    check.numel("src", src, out.numel());
    const CastArgs args{.out = out.data_ptr(),
                        .out_dtype = check.dtype("out", out),
                        .src = {.dtype = check.dtype("src", src),
                                .count = 1,
                                .base = src.data_ptr(),
                                .stride = 0,
                                .peers = {}},
                        .numel = out.numel()};
    require_castable(check, "out", out, args.out_dtype, "src", src, args.src.dtype);
    if (args.src.base == args.out && args.src.dtype == args.out_dtype) return;  // it is there
    refuse_shared(check, "src", src, "out", out);
    launch<cpu::cast, cuda::cast>(check, out, args);
}

void gather_cast_(const Tensor& full, const Tensors& shards) {
    const Checks check("gather_cast_", full);
    check.flat("full", full);
    const int64_t numel = shards.empty() ? 0 : shards[0].numel();
    CastArgs args{.out = full.data_ptr(),
                  .out_dtype = check.dtype("full", full),
                  .src = peer_rows(check, "shards", shards, numel),
                  .numel = numel};
    check.require(full.numel() == args.src.count * numel, "full has ", full.numel(),
                  " elements, but ", args.src.count, " shards of ", numel, " fill ",
                  args.src.count * numel);
    require_castable(check, "full", full, args.out_dtype, "shards", shards[0], args.src.dtype);
    const int64_t part_bytes = numel * size_of(args.out_dtype);
    for (int64_t i = 0; i < args.src.count; ++i) {
        const void* part = static_cast<const char*>(args.out) + i * part_bytes;
        if (args.src.peers[i] == part && args.src.dtype == args.out_dtype) {
            args.src.peers[i] = nullptr;
        } else if (share_memory(args.src.peers[i], numel * size_of(args.src.dtype), args.out,
                                args.src.count * part_bytes)) {
            check.fail("shards[", i, "] and full share memory: pass a copy of one, or ",
                       "the very part of full that the shard fills, in full's dtype");
        }
    }
    launch<cpu::cast, cuda::cast>(check, full, args);
}

MasterArgs master_args(const Checks& check, const char* full_name, const Tensor& full,
                       const Tensor& hi, const Tensor& lo) {
    for (const auto& [name, t, type] :
         {std::tuple(full_name, &full, ScalarType::Float),
          std::tuple("hi", &hi, ScalarType::BFloat16), std::tuple("lo", &lo, ScalarType::Short)}) {
        check.flat(name, *t);
        check.type(name, *t, type);
        check.numel(name, *t, full.numel());
    }
    refuse_shared(check, "hi", hi, full_name, full);
    refuse_shared(check, "lo", lo, full_name, full);
    refuse_shared(check, "hi", hi, "lo", lo);
    return {.full = static_cast<float*>(full.data_ptr()),
            .hi = static_cast<Bf16*>(hi.data_ptr()),
            .lo = static_cast<int16_t*>(lo.data_ptr()),
            .numel = full.numel()};
}

void split_master_(const Tensor& hi, const Tensor& lo, const Tensor& src) {
    const Checks check("split_master_", src);
    launch<cpu::split_master, cuda::split_master>(check, src,
                                                  master_args(check, "src", src, hi, lo));
}

void join_master_(const Tensor& out, const Tensor& hi, const Tensor& lo) {
    const Checks check("join_master_", out);
    launch<cpu::join_master, cuda::join_master>(check, out, master_args(check, "out", out, hi, lo));
}

// The end of reduce_ and reduce_peers_; `chunk` has the dtype of the rows.
void launch_reduce(const Checks& check, const Tensor& acc, const char* chunks_name,
                   const Tensor& chunk, const Rows& chunks, double scale, bool accumulate,
                   const MaybeTensor& stats) {
    const Dtype dtype = check.dtype("acc", acc);
    const bool alone = chunks.count == 1 && chunks.dtype == dtype;
    const ReduceArgs args{
        .acc = acc.data_ptr(),
        .acc_dtype = dtype,
        .chunks = chunks,
        .numel = acc.numel(),
        .scale = scale,
        .accumulate = accumulate,
        .in_place = alone && chunks.row<char>(0) == acc.data_ptr() && scale == 1.0 && !accumulate,
        .stats = check.optional_flat<double>("stats", stats, ScalarType::Double, 2)};
    if ((args.acc_dtype == Dtype::kFloat64) != (chunks.dtype == Dtype::kFloat64))
        check.fail("acc is ", describe(acc), " but ", chunks_name, " is ", describe(chunk),
                   ": float64 is summed only into float64");
    launch<cpu::reduce, cuda::reduce>(check, acc, args);
}

void reduce_(const Tensor& acc, const Tensor& chunks, double scale, bool accumulate,
             const MaybeTensor& stats) {
    const Checks check("reduce_", acc);
    check.flat("acc", acc);
    check.same_device("chunks", chunks);
    const int64_t numel = acc.numel();
    const bool rows = chunks.dim() == 2 && chunks.size(0) > 0 && chunks.size(1) == numel;
    const bool dense = rows && (numel <= 1 || chunks.stride(1) == 1) &&
                       (chunks.size(0) == 1 || chunks.stride(0) >= numel);
    if (!dense)
        check.fail("chunks is ", describe(chunks), ", but must have shape (W, ", numel,
                   ") with W >= 1, stride 1 along a chunk and chunks that do not overlap");
    const Rows given{.dtype = check.dtype("chunks", chunks),
                     .count = chunks.size(0),
                     .base = chunks.data_ptr(),
                     .stride = chunks.stride(0),
                     .peers = {}};
    const int64_t row_bytes = numel * size_of(given.dtype);
    const int64_t acc_bytes = numel * size_of(check.dtype("acc", acc));
    for (int64_t i = 0; i < given.count; ++i) {
        const char* row =
            static_cast<const char*>(given.base) + i * given.stride * size_of(given.dtype);
        const bool same = row == acc.data_ptr() && row_bytes == acc_bytes;
        if (!same && share_memory(row, row_bytes, acc.data_ptr(), acc_bytes))
            check.fail("chunks[", i, "] and acc share memory: pass a copy of one, or ",
                       "the very row as acc, in its dtype");
    }
    launch_reduce(check, acc, "chunks", chunks, given, scale, accumulate, stats);
}

void reduce_peers_(const Tensor& acc, const Tensors& peers, double scale, bool accumulate,
                   const MaybeTensor& stats) {
    const Checks check("reduce_peers_", acc);
    check.flat("acc", acc);
    const Rows rows = peer_rows(check, "peers", peers, acc.numel());
    refuse_shared(check, "peers", peers, "acc", acc);
    launch_reduce(check, acc, "peers", peers[0], rows, scale, accumulate, stats);
}

void clip_factor_(const Tensor& factor, const Tensor& norm, const Tensor& squares, double max_norm,
                  const MaybeTensor& scale) {
    const Checks check("clip_factor_", factor);
    launch<cpu::clip_factor, cuda::clip_factor>(
        check, factor, clip_args(check, factor, norm, squares, max_norm, scale));
}

void adamw_(const Tensors& masters, const Tensors& lows, const Tensors& exp_avgs,
            const Tensors& exp_avg_sqs, const Tensors& grads, const Tensors& sends,
            const Tensor& segments, const Tensor& hypers, const Tensor& steps,
            const MaybeTensor& active, const MaybeTensor& grad_scale, const MaybeTensor& skip) {
    const Checks check("adamw_", segments);
    launch<cpu::adamw, cuda::adamw>(
        check, segments,
        optim_args<Adamw>(
            check, {{{"exp_avgs", exp_avgs, false}, {"exp_avg_sqs", exp_avg_sqs, false}}}, masters,
            lows, grads, sends, segments, hypers, steps, active, grad_scale, skip));
}

void reduce_adamw_(const Tensor& master, const MaybeTensor& low, const Tensor& exp_avg,
                   const Tensor& exp_avg_sq, const Tensors& peers, const MaybeTensor& send,
                   const Tensor& segments, const Tensor& hypers, const Tensor& steps, double scale,
                   const MaybeTensor& stats, const MaybeTensor& active,
                   const MaybeTensor& grad_scale, const MaybeTensor& skip) {
    const Checks check("reduce_adamw_", master);
    ReduceAdamwArgs args = reduce_adamw_args(
        check, master, low, exp_avg, exp_avg_sq, peers, send,
        optim_rows<Adamw>(check, segments, hypers, steps, active, grad_scale, skip));
    args.scale = scale;
    args.stats = check.optional_flat<double>("stats", stats, ScalarType::Double, 2);
    launch<cpu::reduce_adamw, cuda::reduce_adamw>(check, master, args);
}

void sgd_(const Tensors& masters, const Tensors& lows, const Tensors& momentum_buffers,
          const Tensors& grads, const Tensors& sends, const Tensor& segments, const Tensor& hypers,
          const Tensor& steps, const MaybeTensor& active, const MaybeTensor& grad_scale,
          const MaybeTensor& skip) {
    const Checks check("sgd_", segments);
    const OptimArgs<Sgd> args =
        optim_args<Sgd>(check, {{{"momentum_buffers", momentum_buffers, true}}}, masters, lows,
                        grads, sends, segments, hypers, steps, active, grad_scale, skip);
    if (segments.is_cpu() && momentum_buffers.empty())
        for (int64_t g = 0; g < args.rows.num_segments; ++g)
            check.require(args.rows.hypers[g].momentum == 0.0, "hypers[", g, "] has momentum ",
                          args.rows.hypers[g].momentum,
                          ", but momentum_buffers is []: give one for each shard");
    launch<cpu::sgd, cuda::sgd>(check, segments, args);
}

}  // namespace

STABLE_TORCH_LIBRARY(zshard, m) {
    m.def("pack_(Tensor(a!) out, Tensor[] sources, int[] offsets, float scale=1.0) -> ()");
    m.def("unpack_(Tensor(a!)[] targets, Tensor flat, int[] offsets, float scale=1.0) -> ()");
    m.def("cast_(Tensor(a!) out, Tensor src) -> ()");
    m.def("gather_cast_(Tensor(a!) full, Tensor[] shards) -> ()");
    m.def("split_master_(Tensor(a!) hi, Tensor(b!) lo, Tensor src) -> ()");
    m.def("join_master_(Tensor(a!) out, Tensor hi, Tensor lo) -> ()");
    m.def(
        "reduce_(Tensor(a!) acc, Tensor chunks, float scale=1.0, bool accumulate=False, "
        "Tensor(b!)? stats=None) -> ()");
    m.def(
        "reduce_peers_(Tensor(a!) acc, Tensor[] peers, float scale=1.0, bool accumulate=False, "
        "Tensor(b!)? stats=None) -> ()");
    m.def(
        "clip_factor_(Tensor(a!) factor, Tensor(b!) norm, Tensor squares, float max_norm, "
        "Tensor? scale=None) -> ()");
    m.def(
        "adamw_(Tensor(a!)[] masters, Tensor(b!)[] lows, Tensor(c!)[] exp_avgs, Tensor(d!)[] "
        "exp_avg_sqs, Tensor[] grads, Tensor(e!)[] sends, Tensor segments, Tensor hypers, "
        "Tensor(f!) steps, Tensor? active=None, Tensor? grad_scale=None, Tensor? skip=None) -> ()");
    m.def(
        "reduce_adamw_(Tensor(a!) master, Tensor(b!)? low, Tensor(c!) exp_avg, Tensor(d!) "
        "exp_avg_sq, Tensor[] peers, Tensor(e!)? send, Tensor segments, Tensor hypers, Tensor(f!) "
        "steps, float scale=1.0, Tensor(g!)? stats=None, Tensor? active=None, Tensor? "
        "grad_scale=None, Tensor? skip=None) -> ()");
    m.def(
        "sgd_(Tensor(a!)[] masters, Tensor(b!)[] lows, Tensor(c!)[] momentum_buffers, "
        "Tensor[] grads, Tensor(d!)[] sends, Tensor segments, Tensor hypers, Tensor(e!) steps, "
        "Tensor? active=None, Tensor? grad_scale=None, Tensor? skip=None) -> ()");
}

// One door for both devices; without CUDA it says so.
static void register_all(torch::stable::detail::StableLibrary& m) {
    m.impl("pack_", TORCH_BOX(&pack_));
    m.impl("unpack_", TORCH_BOX(&unpack_));
    m.impl("cast_", TORCH_BOX(&cast_));
    m.impl("gather_cast_", TORCH_BOX(&gather_cast_));
    m.impl("split_master_", TORCH_BOX(&split_master_));
    m.impl("join_master_", TORCH_BOX(&join_master_));
    m.impl("reduce_", TORCH_BOX(&reduce_));
    m.impl("reduce_peers_", TORCH_BOX(&reduce_peers_));
    m.impl("clip_factor_", TORCH_BOX(&clip_factor_));
    m.impl("adamw_", TORCH_BOX(&adamw_));
    m.impl("reduce_adamw_", TORCH_BOX(&reduce_adamw_));
    m.impl("sgd_", TORCH_BOX(&sgd_));
}

STABLE_TORCH_LIBRARY_IMPL(zshard, CPU, m) { register_all(m); }
STABLE_TORCH_LIBRARY_IMPL(zshard, CUDA, m) { register_all(m); }

}  // namespace zshard
