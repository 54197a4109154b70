// Steps of ranks that read each other's memory, with threads as ranks and csrc/cpu's loops, under
// ThreadSanitizer: gradients are packed while the others may still read the last ones, summed where
// they lie, and gathered shards are written again only after all have read them. Once so that
// gradients are what is gathered, and once with AdamW in between, which writes what it lends.
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "ops.h"
#include "rendezvous.h"

namespace zshard {
namespace {

using test::check_equal;
using test::where;

constexpr int64_t kRanks = 3, kSteps = 300;
constexpr int64_t kShard = 161, kNumel = kRanks * kShard;  // no multiple of any step of the loops
constexpr double kLong = 60.0;

// What a rank lends the others.
struct Lent {
    alignas(64) Presence for_packed[2];  // two buffers, in turn
    alignas(64) Presence for_shard;
    alignas(64) float packed[2][kNumel];
    alignas(64) float shard[kShard];
    alignas(64) Bf16 send[kShard];
};

int64_t gradient(int64_t rank, int64_t step, int64_t i) { return (rank + 1) * (step % 7) + i % 5; }

int64_t sum_of_gradients(int64_t step, int64_t i) {
    int64_t sum = 0;
    for (int64_t rank = 0; rank < kRanks; ++rank) sum += gradient(rank, step, i);
    return sum;
}

Rendezvous meeting(std::vector<Lent>& lent, const Presence* first, int64_t rank) {
    return {reinterpret_cast<uintptr_t>(first), sizeof(Lent), static_cast<int64_t>(lent.size()),
            rank};
}

void pack(float* packed, int64_t rank, int64_t step) {
    std::vector<float> grads(kNumel - 2);  // and two elements of padding
    for (int64_t i = 0; i < kNumel - 2; ++i) grads[i] = gradient(rank, step, i);
    const Piece whole{grads.data(), Dtype::kFloat32, 0, kNumel - 2, {}};
    const Piece padding{nullptr, Dtype::kFloat32, kNumel - 2, 2, {}};
    cpu::pack({packed, Dtype::kFloat32, kNumel, 1.0, {whole, padding}});
}

void train(std::vector<Lent>& lent, int64_t rank) {
    Rendezvous packed[] = {meeting(lent, &lent[0].for_packed[0], rank),
                           meeting(lent, &lent[0].for_packed[1], rank)};
    Rendezvous shard = meeting(lent, &lent[0].for_shard, rank);
    std::vector<float> acc(kShard);
    std::vector<Bf16> full(kNumel);
    for (int64_t step = 0; step < kSteps; ++step) {
        const int turn = step / 2 % 2;  // at times the same one twice in a row
        check_equal(packed[turn].await_departures(kLong), -1);
        pack(lent[rank].packed[turn], rank, step);
        packed[turn].arrive();
        Rows slices{
            .dtype = Dtype::kFloat32, .count = kRanks, .base = nullptr, .stride = 0, .peers = {}};
        for (int64_t peer = 0; peer < kRanks; ++peer)
            slices.peers[peer] = lent[peer].packed[turn] + rank * kShard;
        check_equal(packed[turn].await_arrivals(kLong), -1);
        double stats[2];
        cpu::reduce({acc.data(), Dtype::kFloat32, slices, kShard, 1.0, false, false, stats});
        packed[turn].depart();

        for (int more = 0; more < 2; ++more) {  // as in a step without a backward between
            check_equal(shard.await_departures(kLong), -1);
            for (int64_t i = 0; i < kShard; ++i) lent[rank].shard[i] = acc[i] + more;
            shard.arrive();
            Rows shards{.dtype = Dtype::kFloat32,
                        .count = kRanks,
                        .base = nullptr,
                        .stride = 0,
                        .peers = {}};
            for (int64_t peer = 0; peer < kRanks; ++peer) shards.peers[peer] = lent[peer].shard;
            check_equal(shard.await_arrivals(kLong), -1);
            cpu::cast({full.data(), Dtype::kBfloat16, shards, kShard});
            shard.depart();

            for (int64_t i = 0; i < kNumel; ++i) {
                const int64_t sum = i < kNumel - 2 ? sum_of_gradients(step, i) + more : more;
                check_equal(convert<float>(full[i]), float(sum), where("step", step, "element", i));
            }
        }
    }
}

// A rank's part of a model that AdamW updates, in two segments with an element between them.
struct Trained {
    std::vector<float> master, exp_avg, exp_avg_sq;  // (numel,)
    std::vector<Segment> segments;
    std::vector<Adamw::Hyper> hypers;
    std::vector<int64_t> steps{0, 0};

    explicit Trained(int64_t numel)
        : master(numel, 0.5f),
          exp_avg(numel),
          exp_avg_sq(numel),
          segments{{0, 0, numel / 3}, {0, numel / 3 + 1, numel}},
          hypers(2, {1e-2, 0.9, 0.99, 1e-8, 0.1, 1.0}) {}

    OptimArgs<Adamw> args(const float* grad, Bf16* send) {
        return {.shards = {{.master = master.data(),
                            .low = nullptr,
                            .states = {exp_avg.data(), exp_avg_sq.data()},
                            .grad = grad,
                            .send = send,
                            .numel = static_cast<int64_t>(master.size())}},
                .grad_dtype = Dtype::kFloat32,
                .split = false,
                .has_send = true,
                .send_dtype = Dtype::kBfloat16,
                .rows = {.num_segments = 2,
                         .segments = segments.data(),
                         .hypers = hypers.data(),
                         .steps = steps.data(),
                         .active = nullptr,
                         .grad_scale = nullptr,
                         .skip = nullptr}};
    }
};

void train_fused(std::vector<Lent>& lent, int64_t rank) {
    Rendezvous packed = meeting(lent, &lent[0].for_packed[0], rank);
    Rendezvous shard = meeting(lent, &lent[0].for_shard, rank);
    Trained mine(kShard);
    std::vector<Trained> everyone(kRanks, Trained(kShard));  // the same, by adamw_
    std::vector<float> sums(kShard);
    std::vector<Bf16> full(kNumel), expected(kShard);
    for (int64_t step = 0; step < kSteps / 3; ++step) {
        check_equal(packed.await_departures(kLong), -1);
        pack(lent[rank].packed[0], rank, step);
        packed.arrive();
        Rows slices{
            .dtype = Dtype::kFloat32, .count = kRanks, .base = nullptr, .stride = 0, .peers = {}};
        for (int64_t peer = 0; peer < kRanks; ++peer)
            slices.peers[peer] = lent[peer].packed[0] + rank * kShard;
        check_equal(packed.await_arrivals(kLong), -1);
        check_equal(shard.await_departures(kLong), -1);
        double stats[2];
        cpu::reduce_adamw({mine.args(nullptr, lent[rank].send), slices, 1.0, stats});
        packed.depart();
        shard.arrive();
        Rows sends{
            .dtype = Dtype::kBfloat16, .count = kRanks, .base = nullptr, .stride = 0, .peers = {}};
        for (int64_t peer = 0; peer < kRanks; ++peer) sends.peers[peer] = lent[peer].send;
        check_equal(shard.await_arrivals(kLong), -1);
        cpu::cast({full.data(), Dtype::kBfloat16, sends, kShard});
        shard.depart();

        for (int64_t owner = 0; owner < kRanks; ++owner) {
            const int64_t first = owner * kShard;
            for (int64_t i = 0; i < kShard; ++i)
                sums[i] = first + i < kNumel - 2 ? float(sum_of_gradients(step, first + i)) : 0.0f;
            cpu::adamw(everyone[owner].args(sums.data(), expected.data()));
            for (int64_t i = 0; i < kShard; ++i)
                if (i != kShard / 3)  // in no segment
                    check_equal(convert<float>(full[first + i]), convert<float>(expected[i]),
                                where("step", step, "owner", owner, "element", i));
        }
    }
}

void run_ranks(void (*body)(std::vector<Lent>&, int64_t)) {
    std::vector<Lent> lent(kRanks);
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < kRanks; ++rank)
        ranks.emplace_back([&lent, body, rank] { body(lent, rank); });
    for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace zshard

int main() {
    zshard::run_ranks(zshard::train);
    zshard::run_ranks(zshard::train_fused);
}
