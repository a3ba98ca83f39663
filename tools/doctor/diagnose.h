#pragma once
/// Reads the facts of all hosts, measures, and judges.

#include "tools/doctor/options.h"
#include "tools/doctor/report.h"

namespace rz::doctor {

Report diagnose_this_host(const Options&);
/// A host that cannot be reached is a finding, and so is a pair that cannot be measured.
Report diagnose_hosts(const Options&);

}  // namespace rz::doctor
