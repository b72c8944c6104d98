#include "quant/test_weight.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/digest.h"
#include "base/status_macros.h"
#include "quant/scalar/float_formats.h"

namespace quern::quant {
namespace {

// splitmix64.
uint64_t Next(uint64_t& state) {
  uint64_t z = (state += 0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

Tile TileOf(const TestWeight& weight, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
  Tile tile;
  tile.dtype = weight.dtype;
  tile.row_begin = row_begin;
  tile.row_end = row_end;
  tile.col_begin = col_begin;
  tile.col_end = col_end;
  const int64_t size = BytesPerElement(weight.dtype);
  tile.row_stride = weight.shape.cols * size;
  tile.data = reinterpret_cast<const std::byte*>(weight.bytes.data()) + row_begin * tile.row_stride + col_begin * size;
  return tile;
}

// Tiles that one thread has to work off in their order: a band, or the segments of a row.
using Piece = std::vector<Tile>;

std::vector<Piece> PiecesOf(const TestWeight& weight, const Tiling& tiling) {
  std::vector<Piece> pieces;
  if (tiling.segment_columns == 0) {
    for (int64_t row = 0; row < weight.shape.rows; row += tiling.band_rows) {
      pieces.push_back({TileOf(weight, row, std::min(row + tiling.band_rows, weight.shape.rows), 0, weight.shape.cols)});
    }
  } else {
    for (int64_t row = 0; row < weight.shape.rows; ++row) {
      Piece& segments = pieces.emplace_back();
      for (int64_t column = 0; column < weight.shape.cols; column += tiling.segment_columns) {
        segments.push_back(TileOf(weight, row, row + 1, column, std::min(column + tiling.segment_columns, weight.shape.cols)));
      }
    }
  }
  if (tiling.threads > 0) {
    uint64_t state = tiling.order;
    for (size_t i = pieces.size(); i > 1; --i) std::swap(pieces[i - 1], pieces[Next(state) % i]);
  }
  return pieces;
}

// Calls `work(thread, tile)` for all tiles; the first error of each thread ends it.
absl::Status ForEachTile(const std::vector<Piece>& pieces, const Tiling& tiling,
                         const std::function<absl::Status(int, const Tile&)>& work) {
  std::atomic<size_t> next = 0;
  std::vector<absl::Status> statuses(std::max(tiling.threads, 1));
  const auto run = [&](int thread) {
    for (size_t i = next++; i < pieces.size() && statuses[thread].ok(); i = next++) {
      for (const Tile& tile : pieces[i]) {
        if (statuses[thread].ok()) statuses[thread] = work(thread, tile);
      }
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < tiling.threads; ++thread) threads.emplace_back(run, thread);
  run(0);
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) QUERN_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

void Append(std::string& bytes, DType dtype, float value) {
  const auto put = [&](auto bits) { bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits); };
  if (dtype == DType::kBF16) {
    put(scalar::Bf16::FromFloat(value));
  } else if (dtype == DType::kF16) {
    put(scalar::F16::FromFloat(value));
  } else {
    put(scalar::F32::FromFloat(value));
  }
}

uint64_t SizeOf(const Region& region) {
  uint64_t size = BytesPerElement(region.dtype);
  for (const uint64_t dimension : region.shape) size *= dimension;
  return size;
}

static_assert(std::is_trivially_copyable_v<RowError>);

}  // namespace

std::vector<RegionBuffer> BuffersOf(EncodedWeight& encoded) {
  std::vector<RegionBuffer> buffers(encoded.regions.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!encoded.regions[i].constant.empty()) continue;
    buffers[i].data = reinterpret_cast<std::byte*>(encoded.data[i].data());
    buffers[i].row_stride = encoded.regions[i].bytes_per_row;
  }
  return buffers;
}

absl::StatusOr<EncodedWeight> EncodeWeight(const Scheme& scheme, const TestWeight& weight, const Tiling& tiling, NonfinitePolicy nonfinite,
                                           const ModuleInputs& inputs, absl::Span<const TestWeight> others) {
  EncodedWeight encoded;
  QUERN_ASSIGN_OR_RETURN(encoded.regions, scheme.Regions(weight.dtype, weight.shape));
  for (const Region& region : encoded.regions) {
    encoded.data.push_back(region.constant);
    // What accumulates begins as zeros; garbage elsewhere shows bytes that nobody writes.
    if (region.constant.empty() && !region.computed) {
      encoded.data.back().assign(SizeOf(region), region.accumulates ? '\0' : '\xA5');
    }
  }
  encoded.errors.resize(weight.shape.rows);
  const std::vector<Piece> pieces = PiecesOf(weight, tiling);
  std::unique_ptr<Statistics> statistics;
  if (scheme.NeedsStatistics(weight.shape, {pieces[0][0].rows(), pieces[0][0].cols()})) {
    // One a thread and one more, merged.
    statistics = scheme.NewStatistics(weight.shape);
    std::vector<std::unique_ptr<Statistics>> parts;
    for (int thread = 0; thread < std::max(tiling.threads, 1); ++thread) parts.push_back(scheme.NewStatistics(weight.shape));
    QUERN_RETURN_IF_ERROR(ForEachTile(pieces, tiling, [&](int thread, const Tile& tile) {
      const bool first = thread == 0 && tile.row_begin % 3 == 1;
      return scheme.Observe(tile, inputs, first ? *statistics : *parts[thread]);
    }));
    for (const std::unique_ptr<Statistics>& part : parts) statistics->Merge(*part);
    for (const TestWeight& member : others) {
      const std::unique_ptr<Statistics> more = scheme.NewStatistics(member.shape);
      QUERN_RETURN_IF_ERROR(
          ForEachTile(PiecesOf(member, tiling), Tiling(), [&](int, const Tile& tile) { return scheme.Observe(tile, inputs, *more); }));
      statistics->Merge(*more);
    }
  }
  QUERN_ASSIGN_OR_RETURN(std::vector<std::string> computed, scheme.ComputedRegions(weight.dtype, weight.shape, statistics.get(), inputs));
  size_t next = 0;
  for (size_t i = 0; i < encoded.regions.size(); ++i) {
    if (!encoded.regions[i].computed) continue;
    if (next == computed.size()) return absl::InternalError("fewer computed regions than regions that are computed");
    encoded.data[i] = std::move(computed[next++]);
  }
  if (next != computed.size()) return absl::InternalError("more computed regions than regions that are computed");
  const std::vector<RegionBuffer> buffers = BuffersOf(encoded);
  QUERN_RETURN_IF_ERROR(ForEachTile(pieces, tiling, [&](int, const Tile& tile) {
    return scheme.Encode(tile, inputs, statistics.get(), nonfinite, buffers,
                         absl::MakeSpan(encoded.errors).subspan(tile.row_begin, tile.rows()));
  }));
  return encoded;
}

absl::StatusOr<std::string> DecodeWeight(const Scheme& scheme, const TestWeight& weight, EncodedWeight& encoded, const Tiling& tiling) {
  TestWeight decoded = weight;
  std::fill(decoded.bytes.begin(), decoded.bytes.end(), '\xA5');
  const std::vector<RegionBuffer> buffers = BuffersOf(encoded);
  QUERN_RETURN_IF_ERROR(ForEachTile(PiecesOf(decoded, tiling), tiling, [&](int, const Tile& tile) {
    return scheme.Decode(tile, buffers, const_cast<std::byte*>(tile.data));
  }));
  return decoded.bytes;
}

TestWeight RandomWeight(DType dtype, Shape2D shape, uint64_t seed, bool unusual) {
  TestWeight weight;
  weight.dtype = dtype;
  weight.shape = shape;
  uint64_t state = seed;
  for (int64_t row = 0; row < shape.rows; ++row) {
    const int row_exponent = static_cast<int>(Next(state) % 12) - 6;
    const bool tiny_row = unusual && Next(state) % 16 == 0;
    for (int64_t column = 0; column < shape.cols; ++column) {
      const uint64_t bits = Next(state);
      // The sum of four 16-bit integers: bell-shaped, at most 19 bits, exact in F32.
      const int64_t sum = static_cast<int64_t>(bits & 0xFFFF) + static_cast<int64_t>((bits >> 16) & 0xFFFF) - 0x10000 +
                          static_cast<int64_t>((bits >> 32) & 0x7FFF) - static_cast<int64_t>((bits >> 47) & 0x7FFF);
      const uint64_t kind = unusual ? Next(state) % 256 : 255;
      float value = std::ldexp(static_cast<float>(sum), row_exponent - 20);
      if (tiny_row) value = std::ldexp(static_cast<float>(sum % 97), dtype == DType::kF16 ? -24 : -133);
      if (kind < 4) value = kind % 2 == 0 ? 0.0f : -0.0f;
      if (kind == 4) value *= 64;
      if (unusual && column / 32 % 11 == row % 11) value = kind % 2 == 0 ? 0.0f : -0.0f;
      Append(weight.bytes, dtype, value);
    }
  }
  return weight;
}

std::string DigestOf(const EncodedWeight& encoded) {
  Sha256 digest;
  for (const std::string& data : encoded.data) digest.Update(data);
  digest.Update(encoded.errors.data(), encoded.errors.size() * sizeof(RowError));
  return HexDigest(digest.Finish());
}

bool SameErrors(const std::vector<RowError>& a, const std::vector<RowError>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(RowError)) == 0;
}

}  // namespace quern::quant
