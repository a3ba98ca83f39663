#include "bench/lower_bound/variants.h"

#include <algorithm>

#include "comm/core/text.h"

namespace rz::bench::lower_bound {
namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;
constexpr std::size_t min_two_phase = 8 * KiB, min_streamed = 1 * MiB, min_single_copy = 16 * KiB;
constexpr std::size_t pieces[] = {1 * KiB, 4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, max_piece};
constexpr std::size_t max_one_shot_piece = 256 * KiB, max_pieces = 512;

void add_staged(std::vector<Variant>& all, std::size_t bytes, bool in_place) {
  if (bytes <= PairState::max_lines * LineSlot::floats * sizeof(float))
    all.push_back({Variant::lines, in_place});
  for (const std::size_t piece : pieces) {
    if (bytes / piece > max_pieces) continue;
    if (bytes <= max_one_shot && piece <= max_one_shot_piece && (piece == pieces[0] || piece <= bytes))
      all.push_back({Variant::one_shot, in_place, piece});
    if (bytes < min_two_phase || piece > bytes / 2) continue;
    all.push_back({Variant::two_phase, in_place, piece});
    if (bytes >= min_streamed) all.push_back({Variant::two_phase, in_place, piece, StoreKind::streamed});
  }
}

void add_single_copy(std::vector<Variant>& all, std::size_t bytes, bool in_place) {
  for (const std::size_t piece : pieces) {
    if (bytes < min_single_copy || piece < 16 * KiB || piece > std::max(bytes / 2, 16 * KiB)) continue;
    all.push_back({Variant::single_copy, in_place, piece});
    if (bytes >= min_streamed) all.push_back({Variant::single_copy, in_place, piece, StoreKind::streamed});
  }
}

void add_mapped(std::vector<Variant>& all, std::size_t bytes) {
  for (const StoreKind stores : {StoreKind::cached, StoreKind::streamed}) {
    if (stores == StoreKind::streamed && bytes < min_streamed) continue;
    all.push_back({Variant::read_both, false, 0, stores});
    for (const bool in_place : {false, true}) all.push_back({Variant::halves, in_place, 0, stores});
  }
}

}  // namespace

std::string Variant::method() const {
  return concat(mapped()              ? "mapped"
                : kind == single_copy ? "single_copy"
                                      : "staged",
                in_place ? "_in_place" : "");
}

std::string Variant::name() const {
  constexpr const char* names[] = {"lines", "one_shot", "two_phase", "single_copy", "read_both", "halves"};
  std::string text = names[kind];
  if (piece) text += concat('/', piece);
  return text + (stores == StoreKind::streamed ? "/streamed" : "");
}

std::vector<Variant> variants_for(std::size_t bytes) {
  std::vector<Variant> all;
  add_staged(all, bytes, false);
  add_staged(all, bytes, true);
  for (const bool in_place : {false, true}) add_single_copy(all, bytes, in_place);
  add_mapped(all, bytes);
  return all;
}

}  // namespace rz::bench::lower_bound
