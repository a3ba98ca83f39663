#include "tools/train_gpt/inputs.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "comm/core/error.h"
#include "tools/train_gpt/model/model_config.h"

namespace rz::train_gpt {
namespace {

namespace fs = std::filesystem;

StrategyKind strategy_of(const Options& o, const DsConfig& ds) {
  if (!o.strategy.empty()) try {
      return strategy_from_name(o.strategy);
    } catch (const Error& e) {
      fail(e.code(), "--strategy: ", e.what());
    }
  constexpr StrategyKind by_stage[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                       StrategyKind::zero3};
  return by_stage[ds.zero_stage];
}

std::size_t seq_len_of(const Options& o, const Gpt2Config& c) {
  const std::size_t length = o.seq_len ? static_cast<std::size_t>(*o.seq_len) : c.n_positions;
  require(length <= c.n_positions, Errc::config, "--seq-len: ", length, " is beyond the model's n_positions ",
          c.n_positions, " (", o.model, "); give at most that");
  return length;
}

void check_sample(const Options& o, const Gpt2Config& c) {
  require(!o.sample || c.vocab_size == 256, Errc::config,
          "--sample: text samples need a byte vocabulary, vocab_size 256; ", o.model, " has ", c.vocab_size);
}

/// The nearest existing ancestor of a path that will be created.
fs::path existing_parent(fs::path path) {
  path = fs::absolute(path).lexically_normal();
  while (!fs::exists(path) && path.has_parent_path() && path != path.parent_path()) path = path.parent_path();
  return path;
}

void require_writable(const char* flag, const std::string& path, const fs::path& what) {
  require(::access(what.c_str(), W_OK) == 0, Errc::config, flag, ": ", path,
          ": cannot be written: ", what.string(), ": ", std::strerror(errno));
}

void check_outputs(const Options& o) {
  if (!o.metrics.empty()) {
    const fs::path parent = fs::absolute(o.metrics).parent_path();
    require(fs::is_directory(parent), Errc::config, "--metrics: ", o.metrics, ": there is no folder ",
            parent.string(), "; make it first");
    require(!fs::is_directory(o.metrics), Errc::config, "--metrics: ", o.metrics,
            " is a folder; name a file");
    require_writable("--metrics", o.metrics, fs::exists(o.metrics) ? fs::path(o.metrics) : parent);
  }
  if (!o.save.empty()) {
    const fs::path parent = existing_parent(o.save);
    require(fs::is_directory(parent), Errc::config, "--save: ", o.save, ": ", parent.string(),
            " is not a folder");
    require_writable("--save", o.save, parent);
  }
}

}  // namespace

Inputs read_inputs(const Options& o, int rank, int ranks) {
  Inputs in;
  in.model = std::make_unique<Gpt2>(read_model_config(o.model));
  const Gpt2Config& config = in.model->config();
  in.ds = read_ds_config(o.config);
  in.sizes = resolve_batch(in.ds, ranks);
  in.strategy = strategy_of(o, in.ds);
  in.seq_len = seq_len_of(o, config);
  check_sample(o, config);
  if (rank == 0) check_outputs(o);
  if (!o.init.empty()) in.checkpoint.emplace(SafetensorsFile::open(o.init), in.model->parameters());
  in.tokens = o.tokens.empty() ? Tokens::from_text(o.data, std::array{o.save, o.metrics})
                               : Tokens::from_file(o.tokens);
  in.samples = in.tokens.samples(in.seq_len);
  require(!o.shuffle || !in.ds.drop_last || in.samples >= static_cast<std::uint64_t>(ranks), Errc::config,
          in.tokens.name(), ": ", in.samples, " samples are too few for ", ranks,
          " ranks when dataloader_drop_last is true; give more data, or set it to false");
  in.tokens.limit_vocabulary(config.vocab_size);
  if (rank == 0) in.tokens.check_vocabulary();
  return in;
}

}  // namespace rz::train_gpt
