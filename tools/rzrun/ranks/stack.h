#pragma once
/// The stack of a rank that has crashed, as text.

#include <string>

#include "comm/transport/flight_report.h"

namespace rz::rzrun {

/// One line a frame, innermost first: function, file and line by addr2line, if it is installed and needs less
/// than 3 s; else the file and the address in it. The address of the crash comes first, where there is one.
/// Empty without a stack. It starts and awaits a child: no other thread may wait for any child
/// meanwhile.
std::string describe_stack(const flight::Report&);

}  // namespace rz::rzrun
