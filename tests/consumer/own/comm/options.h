#pragma once
// The project's own file, which has the name of one of ringzero's and stands before it on the include path.

namespace consumer {
struct Options {
  int ranks = 2;
};
}  // namespace consumer
