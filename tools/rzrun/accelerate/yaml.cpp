#include "tools/rzrun/accelerate/yaml.h"

#include <yaml.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>

#include "comm/core/error.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::accelerate {
namespace {

class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { yaml_event_delete(&event_); }
  yaml_event_t* get() { return &event_; }
  const yaml_event_t* operator->() const { return &event_; }
  int line() const { return static_cast<int>(event_.start_mark.line) + 1; }

 private:
  yaml_event_t event_{};
};

bool is_null_word(const std::string& text) {
  for (const char* word : {"", "~", "null", "Null", "NULL"})
    if (text == word) return true;
  return false;
}

class YamlReader {
 public:
  YamlReader(std::string_view text, const std::string& file) : file_(file) {
    require(yaml_parser_initialize(&parser_) == 1, Errc::config, file, ": libyaml: no memory");
    yaml_parser_set_encoding(&parser_, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&parser_, reinterpret_cast<const unsigned char*>(text.data()), text.size());
  }
  YamlReader(const YamlReader&) = delete;
  YamlReader& operator=(const YamlReader&) = delete;
  ~YamlReader() { yaml_parser_delete(&parser_); }

  YamlNode document() {
    expect(YAML_STREAM_START_EVENT);
    YamlNode root;
    root.line = 1;
    {
      Event start;
      next(start);
      if (start->type == YAML_STREAM_END_EVENT) return root;
    }
    {
      Event first;
      next(first);
      root = node(first, 1);
    }
    expect(YAML_DOCUMENT_END_EVENT);
    Event end;
    next(end);
    require(end->type == YAML_STREAM_END_EVENT, Errc::config, place(end.line()),
            "a second document begins; leave one in the file");
    return root;
  }

 private:
  std::string place(int line) const { return concat(file_, ":", line, ": "); }

  void next(Event& event) {
    if (yaml_parser_parse(&parser_, event.get()) == 1) return;
    const std::string problem = parser_.problem ? parser_.problem : "no memory";
    require(parser_.error != YAML_READER_ERROR, Errc::config, file_, ": byte ", parser_.problem_offset, ": ",
            problem, "; write the file in UTF-8");
    fail(Errc::config, place(static_cast<int>(parser_.problem_mark.line) + 1), problem,
         parser_.context ? concat(" ", parser_.context) : "",
         "; it must be YAML, with spaces that indent it");
  }

  void expect(yaml_event_type_t type) {
    Event event;
    next(event);
    require(event->type == type, Errc::config, place(event.line()),
            "unexpected text; it must be one mapping");
  }

  void refuse_marks(const Event& e, const unsigned char* anchor, const unsigned char* tag) const {
    require(!anchor, Errc::config, place(e.line()),
            "an anchor (&NAME) is not accepted; write the value itself");
    require(!tag, Errc::config, place(e.line()), "a tag (!NAME) is not accepted; write the value alone");
  }

  YamlNode node(const Event& e, int depth) {
    require(depth <= max_yaml_depth, Errc::config, place(e.line()), "more than ", max_yaml_depth,
            " levels of blocks and lists; a file of Accelerate has two");
    YamlNode found;
    found.line = e.line();
    switch (e->type) {
      case YAML_SCALAR_EVENT:
        read_scalar(e, found);
        break;
      case YAML_MAPPING_START_EVENT:
        refuse_marks(e, e->data.mapping_start.anchor, e->data.mapping_start.tag);
        found.kind = YamlNode::Kind::mapping;
        read_entries(found, depth);
        break;
      case YAML_SEQUENCE_START_EVENT:
        refuse_marks(e, e->data.sequence_start.anchor, e->data.sequence_start.tag);
        found.kind = YamlNode::Kind::list;
        for (Event item; next(item), item->type != YAML_SEQUENCE_END_EVENT;) {
          found.items.push_back(node(item, depth + 1));
          yaml_event_delete(item.get());
        }
        break;
      case YAML_ALIAS_EVENT:
        fail(Errc::config, place(e.line()), "an alias (*NAME) is not accepted; write the value itself");
      default:
        fail(Errc::config, place(e.line()), "unexpected text; it must be one mapping");
    }
    return found;
  }

  void read_scalar(const Event& e, YamlNode& found) const {
    const auto& scalar = e->data.scalar;
    refuse_marks(e, scalar.anchor, scalar.tag);
    found.text.assign(reinterpret_cast<const char*>(scalar.value), scalar.length);
    found.quoted = scalar.style != YAML_PLAIN_SCALAR_STYLE;
    found.kind = !found.quoted && is_null_word(found.text) ? YamlNode::Kind::null : YamlNode::Kind::scalar;
    require(found.text.find('\0') == std::string::npos, Errc::config, place(e.line()),
            "a value has a zero byte; remove it");
  }

  void read_entries(YamlNode& found, int depth) {
    std::set<std::string> seen;
    for (Event key; next(key), key->type != YAML_MAPPING_END_EVENT;) {
      const int line = key.line();
      require(key->type == YAML_SCALAR_EVENT || key->type == YAML_ALIAS_EVENT, Errc::config, place(line),
              "a key is a mapping or a list; a key is a word");
      const YamlNode name = node(key, depth);
      yaml_event_delete(key.get());
      require(seen.insert(name.text).second, Errc::config, place(line), "the key ", hosts::quoted(name.text),
              " is there twice; remove one");
      Event value;
      next(value);
      found.entries.push_back({name.text, node(value, depth + 1)});
      found.entries.back().node.line = line;
    }
  }

  const std::string& file_;
  yaml_parser_t parser_{};
};

}  // namespace

YamlNode parse_yaml(std::string_view text, const std::string& file) {
  require(text.size() <= max_yaml_bytes, Errc::config, file, ": it has more than ",
          human_bytes(max_yaml_bytes), "; a file of Accelerate has less than 4 KiB");
  return YamlReader(text, file).document();
}

YamlNode read_yaml(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text(max_yaml_bytes + 1, '\0');
  require(in.is_open(), Errc::config, "--config_file ", path, ": ", std::strerror(errno));
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  require(!in.bad(), Errc::config, "--config_file ", path, ": it cannot be read; is it a file?");
  text.resize(static_cast<std::size_t>(in.gcount()));
  return parse_yaml(text, path);
}

}  // namespace rz::accelerate
