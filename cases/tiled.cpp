// Instances whose rows lie on the GPU alone: repeated there from a tile of tokens, and looked at by
// slices.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "cases/elements.h"
#include "cases/instance.h"

namespace deltic::cases {
namespace {

// Of the widest tensor. Drawing them takes 20 ms on 16 cores.
constexpr int64_t kTileBytes = int64_t{4} << 20;
constexpr int64_t kMostTileTokens = 4096;

bool is_state(const std::string& name) {
  return name == "initial_state" || name == "state_pool" || name == "final_state" ||
         name == "d_final_state";
}
bool has_chunks(const Case& c) {  // sums of gates and A start anew with every chunk
  return c.is_block() && c.op != Op::cumsum && c.op != Op::gate && c.op != Op::l2norm &&
         c.op != Op::rmsnorm;
}
int64_t unit_of(const Case& c) { return has_chunks(c) ? c.chunk : 1; }
int64_t heads_of(const Case& c) { return c.op == Op::l2norm ? c.H : c.HV; }
int64_t first_token(const Case& c, int64_t n) {  // counted over the batch rows
  return c.packed ? c.sequence_begin(n) : n * c.length;
}
size_t bytes_of(const TensorView& t) {
  return static_cast<size_t>(t.numel() * size_of(dtype_of(t)));
}
size_t slot_bytes(const TensorView& t) {  // [slots, HV, ...]
  return bytes_of(t) / static_cast<size_t>(std::max<int64_t>(t.shape[0], 1));
}
size_t row_bytes(const TensorView& t) {  // [B, T, heads] or [B, T, heads, width]
  return static_cast<size_t>((t.rank > 3 ? t.shape[3] : 1) * size_of(dtype_of(t)));
}

// Odd numbers of units, another one for every tensor as far as the tile allows.
int64_t period_of(int64_t tile_tokens, int64_t unit, int64_t which) {
  const int64_t units = tile_tokens / unit;
  return (units - 2 * std::min(which, (units - 1) / 4)) * unit;
}

// Fills `bytes` with repetitions of their first `period` bytes.
void repeat_bytes(std::byte* data, size_t period, size_t bytes) {
  for (size_t done = period; done < bytes;) {
    const size_t more = std::min(done, bytes - done);
    device::copy(data + done, data, more, nullptr);
    done += more;
  }
}

// Up to `count` of [0, all). `turn`: not all in one class of the remainders by four, in which heads
// with slow gates stand.
std::vector<int64_t> spread(int64_t all, int64_t count, bool turn) {
  std::set<int64_t> chosen;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t even = count > 1 && !turn ? i * (all - 1) / (count - 1) : i * (all / count);
    chosen.insert(std::min(all - 1, even + (turn && count < all ? i % 4 : 0)));
  }
  return {chosen.begin(), chosen.end()};
}

Case case_of(const Case& c, const Slice& slice) {
  Case part = c;
  part.packed = true;
  part.seqs.clear();
  for (int64_t n : slice.sequences)
    part.seqs.push_back(std::min(c.sequence_length(n), slice.tokens));
  part.H = part.HV = static_cast<int64_t>(slice.heads.size());
  if (!slice.is_whole(c)) {  // states at the end are not those of the call
    part.final_state = Final::none;
    if (c.pool != Pool::none) part.pool = Pool::peek;
  }
  return normalise(part);
}

template <class Word>
int64_t find_not_finite(const std::vector<std::byte>& bytes, size_t count, Word exponent) {
  const auto* words = reinterpret_cast<const Word*>(bytes.data());
  int64_t first = static_cast<int64_t>(count);
#pragma omp parallel for reduction(min : first)
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
    if ((words[i] & exponent) == exponent) first = std::min(first, i);
  }
  return first == static_cast<int64_t>(count) ? -1 : first;
}

}  // namespace

int64_t Slice::token_heads(const Case& c) const {
  int64_t sum = 0;
  for (int64_t n : sequences) sum += std::min(c.sequence_length(n), tokens);
  return sum * static_cast<int64_t>(heads.size());
}
bool Slice::is_whole(const Case& c) const {
  return std::all_of(sequences.begin(), sequences.end(),
                     [&](int64_t n) { return c.sequence_length(n) <= tokens; });
}

Slice few_tokens(const Case& c, int64_t token_heads) {
  const int64_t N = c.num_sequences(), HV = heads_of(c),
                longest = std::max<int64_t>(c.longest(), 1);
  if (c.num_real_tokens() * HV <= token_heads) {
    Slice all{std::vector<int64_t>(static_cast<size_t>(N)),
              std::vector<int64_t>(static_cast<size_t>(HV)), longest};
    std::iota(all.sequences.begin(), all.sequences.end(), 0);
    std::iota(all.heads.begin(), all.heads.end(), 0);
    return all;
  }
  int64_t sequences = std::min<int64_t>(N, 4), heads = std::min<int64_t>(HV, 4);
  while (2 * sequences * heads * longest <= token_heads && (heads < HV || sequences < N)) {
    if (heads < HV)
      heads = std::min(HV, 2 * heads);
    else
      sequences = std::min(N, 2 * sequences);
  }
  Slice slice{spread(N, sequences, false), spread(HV, heads, true), 0};
  int64_t most = 0;
  for (int64_t n = 0; n < N; ++n) {
    if (c.sequence_length(n) > c.sequence_length(most)) most = n;
  }
  if (std::find(slice.sequences.begin(), slice.sequences.end(), most) == slice.sequences.end())
    slice.sequences[slice.sequences.size() / 2] = most;
  const int64_t unit = has_chunks(c) ? c.chunk : 1;  // whole chunks
  slice.tokens = std::max(token_heads / (sequences * heads) / unit, int64_t{1}) * unit;
  return slice;
}

Slice whole_sequence(const Case& c, int64_t token_heads) {
  int64_t most = 0;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    if (c.sequence_length(n) > c.sequence_length(most)) most = n;
  }
  const int64_t length = std::max<int64_t>(c.longest(), 1), HV = heads_of(c);
  const int64_t heads = std::clamp<int64_t>(token_heads / length, 1, HV);
  // One head alone is not the slow one: its error is not that of all.
  return {{most},
          heads > 1 ? spread(HV, heads, true) : std::vector<int64_t>{std::min<int64_t>(1, HV - 1)},
          length};
}

bool Instance::can_be_tiled(const Case& c) { return can_be_repeated(c) && !c.is_gradient(); }

bool Instance::can_be_repeated(const Case& c) {
  const bool pool_is_plain = c.pool != Pool::mixed && c.pool != Pool::tokens;
  bool chunks_are_whole = true;
  for (int64_t n = 0; n < c.num_sequences(); ++n)
    chunks_are_whole &= c.sequence_length(n) % unit_of(c) == 0;
  return c.strided == Layout::packed && !c.gradient && c.op != Op::conv && c.op != Op::move &&
         c.op != Op::commit && !c.record && c.from.empty() && c.op != Op::rmsnorm && c.pad == 0 &&
         c.ckpt.empty() && !c.has_servers_lists() && pool_is_plain && chunks_are_whole &&
         c.num_real_tokens() > 0;
}

Case Instance::tile_of(const Case& c) {
  const auto width = [&](int64_t heads, int64_t columns, DType type) {
    return heads * columns * size_of(type);
  };
  int64_t widest = std::max({width(c.H, c.K, c.dtype), width(c.HV, c.V, c.dtype),
                             width(c.HV, c.gate == Gate::channel ? c.K : 1, c.gdtype)});
  if (c.op == Op::inverse || c.op == Op::wy)
    widest = std::max(widest, width(c.HV, c.chunk, c.dtype));
  const int64_t unit = unit_of(c);
  const int64_t tokens = std::clamp<int64_t>(kTileBytes / widest, 65, kMostTileTokens);
  Case tile = c;
  tile.packed = false;
  tile.seqs.clear();
  tile.batch = 1;
  tile.length = (std::max<int64_t>(tokens / unit, 1) | 1) * unit;
  return normalise(tile);
}

Instance Instance::tiled(const Case& c, size_t copies, const Instance& tile) {
  Instance large;
  large.spec_ = c;
  large.memory_ = Memory::lists;
  large.place_ = {.device = DeviceType::cuda, .copies = copies};
  large.generate();
  for (auto& t : large.list_) {
    if (t->name == "cu_seqlens_host") continue;
    if (t->buffer.has_memory())
      t->buffer.mirror(copies);
    else
      t->buffer = Buffer::on_gpu(bytes_of(t->view), copies);
  }
  large.bind();
  large.repeat(tile);
  return large;
}

void Instance::repeat(const Instance& tile) {
  int64_t which = 0;
  for (const auto& t : list_) {
    if (t->buffer.has_memory() || t->role == Role::output) continue;
    if (is_state(t->name)) {
      repeat_states(*t, tile);
    } else {
      const int64_t tokens = spec_.num_batches() * spec_.num_tokens();
      const int64_t period =
          std::min(period_of(tile.spec_.length, unit_of(spec_), which++), tokens);
      const size_t per_token = bytes_of(t->view) / static_cast<size_t>(tokens);
      std::byte* data = t->buffer.device_data(0);
      const size_t bytes = static_cast<size_t>(period) * per_token;
      device::upload(data, tile.tensor(t->name).buffer.data(), bytes);
      repeat_bytes(data, bytes, bytes_of(t->view));
    }
    for (size_t i = 1; i < place_.copies; ++i)
      device::copy(t->buffer.device_data(i), t->buffer.device_data(0), bytes_of(t->view), nullptr);
  }
  device::synchronize();
}

// Every sequence's state is the tile's, turned by another number of rows.
void Instance::repeat_states(const Tensor& t, const Instance& tile) const {
  const Tensor& source = tile.tensor(t.name);
  const bool is_pool = t.name == "state_pool";
  const size_t bytes = slot_bytes(t.view);
  const size_t row = static_cast<size_t>(t.view.shape[3] * size_of(dtype_of(t.view)));
  const int64_t from = is_pool ? std::max<int64_t>(tile.read_slots_[0], 0) : 0;
  const auto scratch = device::allocate(bytes);
  device::upload(scratch.get(), source.buffer.data() + static_cast<size_t>(from) * bytes, bytes);
  for (int64_t n = 0; n < spec_.num_sequences(); ++n) {
    const int64_t slot = is_pool ? read_slots_[static_cast<size_t>(n)] : n;
    if (slot < 0) continue;  // slots that nobody reads stay NaN
    std::byte* data = t.buffer.device_data(0) + static_cast<size_t>(slot) * bytes;
    const size_t turn = static_cast<size_t>(n) * 37 * row % bytes;
    device::copy(data, scratch.get() + turn, bytes - turn, nullptr);
    if (turn > 0) device::copy(data + bytes - turn, scratch.get(), turn, nullptr);
  }
  device::synchronize();  // scratch goes
}

// One tensor of a part, from the first copy.
void Instance::gather(const Slice& slice, Tensor& part, const Instance& parts) const {
  const Tensor& from = tensor(part.name);
  const auto num_heads = static_cast<int64_t>(slice.heads.size());
  const auto staging = device::allocate(bytes_of(part.view));
  device::set(staging.get(), 0xFF, bytes_of(part.view));  // slots of a pool that nobody asks for
  const std::byte* source = from.buffer.device_data(0);
  for (size_t i = 0; i < slice.sequences.size(); ++i) {
    const int64_t n = slice.sequences[i];
    for (int64_t j = 0; j < num_heads; ++j) {
      const int64_t h = slice.heads[static_cast<size_t>(j)];
      if (is_state(part.name)) {
        const size_t bytes = slot_bytes(from.view) / static_cast<size_t>(spec_.HV);
        const auto copy_slot = [&](int64_t a, int64_t b) {
          if (a < 0 || b < 0) return;
          device::copy(staging.get() + static_cast<size_t>(b * num_heads + j) * bytes,
                       source + static_cast<size_t>(a * spec_.HV + h) * bytes, bytes, nullptr);
        };
        if (part.name == "state_pool") {
          copy_slot(read_slots_[static_cast<size_t>(n)], parts.read_slots_[i]);
          copy_slot(write_slots_[static_cast<size_t>(n)], parts.write_slots_[i]);
        } else {
          copy_slot(n, static_cast<int64_t>(i));
        }
        continue;
      }
      const int64_t heads = from.view.shape[2], head = h * heads / heads_of(spec_);
      const size_t width = row_bytes(part.view);
      device::copy_2d(
          staging.get() + static_cast<size_t>(
                              parts.spec_.sequence_begin(static_cast<int64_t>(i)) * num_heads + j) *
                              width,
          static_cast<size_t>(num_heads) * width,
          source + static_cast<size_t>(first_token(spec_, n) * heads + head) * width,
          static_cast<size_t>(heads) * width, width,
          static_cast<size_t>(parts.spec_.sequence_length(static_cast<int64_t>(i))));
    }
  }
  device::synchronize();
  device::download(part.buffer.data(), staging.get(), bytes_of(part.view));
}

Instance Instance::inputs_of(const Slice& slice) const {
  Instance part;
  part.spec_ = case_of(spec_, slice);
  part.memory_ = Memory::blank;
  part.generate();
  for (auto& t : part.list_) {
    if (t->role == Role::output) continue;
    if (t->view.rank > 1) {
      gather(slice, *t, part);
    } else if (t->name == "A_log" || t->name == "dt_bias") {  // [HV] or [HV * K]
      const Tensor& from = tensor(t->name);
      const size_t bytes = bytes_of(from.view) / static_cast<size_t>(spec_.HV);
      for (size_t j = 0; j < slice.heads.size(); ++j)
        std::memcpy(t->buffer.data() + j * bytes,
                    from.buffer.data() + static_cast<size_t>(slice.heads[j]) * bytes, bytes);
    }
    t->before.assign(t->buffer.data(), t->buffer.data() + t->buffer.bytes());
  }
  return part;
}

void Instance::outputs_of(const Slice& slice, Instance& part) const {
  for (auto& t : part.list_) {
    if (t->role == Role::input) continue;
    gather(slice, *t, part);
    if (t->name != "state_pool") continue;
    // Slots that the part does not write are none of its outputs.
    const size_t bytes = slot_bytes(t->view);
    for (int64_t slot = 0; slot < t->view.shape[0]; ++slot) {
      if (std::binary_search(part.pool_written_.begin(), part.pool_written_.end(), slot)) continue;
      const size_t at = static_cast<size_t>(slot) * bytes;
      std::memcpy(t->buffer.data() + at, t->before.data() + at, bytes);
    }
  }
}

std::string Instance::not_finite() const {
  constexpr size_t kPiece = size_t{32} << 20;
  std::vector<std::byte> piece;
  for (const auto& t : list_) {
    if (t->role != Role::output) continue;
    const size_t all = bytes_of(t->view);
    const DType type = dtype_of(t->view);
    const auto size = static_cast<size_t>(size_of(type));
    for (size_t done = 0; done < all; done += kPiece) {
      const size_t bytes = std::min(kPiece, all - done);
      piece.resize(bytes);
      device::download(piece.data(), t->buffer.device_data(0) + done, bytes);
      const int64_t at =
          type == DType::f32    ? find_not_finite<uint32_t>(piece, bytes / size, 0x7F800000u)
          : type == DType::bf16 ? find_not_finite<uint16_t>(piece, bytes / size, 0x7F80u)
                                : find_not_finite<uint16_t>(piece, bytes / size, 0x7C00u);
      if (at >= 0)
        return t->name + ": not finite, or never written, at element " +
               std::to_string(done / size + static_cast<size_t>(at));
    }
  }
  return "";
}

}  // namespace deltic::cases
