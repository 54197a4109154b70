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
        check.require(false, "the tensors are on ", device_of(on),
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
    const auto* flat_bytes = static_cast<const char*>(args.flat);
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
            check.require(false, list_name, "[", i, "] is ", describe(t), " but ", flat_name,
                          " is ", describe(flat),
                          ": float64 goes only with float64, keep it in a flat buffer of its own");
        if (offsets[i] < end || offsets[i] > args.numel - numel)
            check.require(
                false, list_name, "[", i, "] has ", numel, " elements and offset ", offsets[i],
                ", which ",
                offsets[i] < end
                    ? text("lies before the end of the entry before it, ", end)
                    : text("passes the end of ", flat_name, ", ", args.numel, " elements"),
                ": offsets must ascend and leave room for every entry");
        const std::optional<Strided> view = merge_dims(t);
        if (!view)
            check.require(false, list_name, "[", i, "] is ", describe(t),
                          ": too many dimensions to walk, pass t.contiguous()");
        if (numel == 0) continue;
        auto* data = static_cast<char*>(t.data_ptr());
        if (data < flat_bytes + args.numel * size_of(args.dtype) &&
            flat_bytes < data + extent(*view, numel) * size_of(dtype))
            check.require(false, list_name, "[", i, "] and ", flat_name,
                          " share memory: pass a copy of one");
        if (!zero_gaps && may_overlap(*view))
            check.require(
                false, list_name, "[", i, "] is ", describe(t),
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

void cast_(const Tensor& out, const Tensor& src) {
    const Checks check("cast_", out);
    check.flat("out", out);
    check.flat("src", src);
    check.numel("src", src, out.numel());
    const CastArgs args{.out = out.data_ptr(),
                        .out_dtype = check.dtype("out", out),
                        .src = src.data_ptr(),
                        .src_dtype = check.dtype("src", src),
                        .numel = out.numel()};
    const auto is_16_bit = [](Dtype dtype) { return size_of(dtype) == 2; };
    const bool wide = args.out_dtype == Dtype::kFloat64 || args.src_dtype == Dtype::kFloat64;
    if (wide && (is_16_bit(args.out_dtype) || is_16_bit(args.src_dtype)))
        check.require(false, "out is ", describe(out), " and src is ", describe(src),
                      ": float64 is cast only from and to float32, go through float32");
    launch<cpu::cast, cuda::cast>(check, out, args);
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
        check.require(false, "chunks is ", describe(chunks), ", but must have shape (W, ", numel,
                      ") with W >= 1, stride 1 along a chunk and chunks that do not overlap");
    const ReduceArgs args{
        .acc = acc.data_ptr(),
        .acc_dtype = check.dtype("acc", acc),
        .chunks = chunks.data_ptr(),
        .chunk_dtype = check.dtype("chunks", chunks),
        .world_size = chunks.size(0),
        .chunk_stride = chunks.stride(0),
        .numel = numel,
        .scale = scale,
        .accumulate = accumulate,
        .stats = check.optional_flat<double>("stats", stats, ScalarType::Double, 2)};
    if ((args.acc_dtype == Dtype::kFloat64) != (args.chunk_dtype == Dtype::kFloat64))
        check.require(false, "acc is ", describe(acc), " but chunks is ", describe(chunks),
                      ": float64 is summed only into float64");
    launch<cpu::reduce, cuda::reduce>(check, acc, args);
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
    m.def("split_master_(Tensor(a!) hi, Tensor(b!) lo, Tensor src) -> ()");
    m.def("join_master_(Tensor(a!) out, Tensor hi, Tensor lo) -> ()");
    m.def(
        "reduce_(Tensor(a!) acc, Tensor chunks, float scale=1.0, bool accumulate=False, "
        "Tensor(b!)? stats=None) -> ()");
    m.def(
        "adamw_(Tensor(a!)[] masters, Tensor(b!)[] lows, Tensor(c!)[] exp_avgs, Tensor(d!)[] "
        "exp_avg_sqs, Tensor[] grads, Tensor(e!)[] sends, Tensor segments, Tensor hypers, "
        "Tensor(f!) steps, Tensor? active=None, Tensor? grad_scale=None, Tensor? skip=None) -> ()");
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
    m.impl("split_master_", TORCH_BOX(&split_master_));
    m.impl("join_master_", TORCH_BOX(&join_master_));
    m.impl("reduce_", TORCH_BOX(&reduce_));
    m.impl("adamw_", TORCH_BOX(&adamw_));
    m.impl("sgd_", TORCH_BOX(&sgd_));
}

STABLE_TORCH_LIBRARY_IMPL(zshard, CPU, m) { register_all(m); }
STABLE_TORCH_LIBRARY_IMPL(zshard, CUDA, m) { register_all(m); }

}  // namespace zshard
