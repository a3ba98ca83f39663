// Prints the topology of the machine as ringzero detects it.
#include "comm/topology.h"

#include <cstdio>

#include "tools/command_line/command_line.h"

int main(int argc, char** argv) {
  return rz::run_program("topology", [&] {
    rz::CommandLine line("Prints the machine as ringzero sees it: processor, cores, NUMA nodes.", "topology",
                         "");
    const std::string help = line.parse(argc, argv);
    if (!help.empty()) return rz::print_help(help);
    rz::processors_for(0, 1);  // refuses hwloc's description of another machine
    return std::puts(rz::describe(rz::read_topology()).c_str()) < 0 ? 1 : 0;
  });
}
