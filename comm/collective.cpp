#include "comm/collective.h"

namespace rz {

const char* name(Collective c) {
  static constexpr const char* names[] = {"all_reduce",   "reduce_scatter", "all_gather", "broadcast",
                                          "reduce",       "gather",         "scatter",    "all_to_all",
                                          "all_to_all_v", "send",           "recv",       "barrier"};
  static_assert(sizeof names / sizeof names[0] == collective_count);
  return names[static_cast<int>(c)];
}

bool reduces(Collective c) {
  return c == Collective::all_reduce || c == Collective::reduce_scatter || c == Collective::reduce;
}

}  // namespace rz
