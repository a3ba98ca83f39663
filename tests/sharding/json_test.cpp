#include "sharding/io/json.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tests/support/error_of.h"

namespace rz {
namespace {

nlohmann::json relaxed(const std::string& text) { return parse_json(text, "ds.json", JsonDialect::relaxed); }

std::string refusal(const std::string& text) {
  const Error e = test::error_of([&] { relaxed(text); });
  EXPECT_EQ(e.code(), Errc::config);
  return e.what();
}

TEST(Json, CommentsAreThoseOfHjson) {
  const auto node = relaxed(R"(# first line
  {
    // "a": 1,
    "b": 2, /* "b": 3, */ # "c": 4,
    "d": "# // /* kept */" // "e": 5
  }
  // the end)");
  EXPECT_EQ(node, (nlohmann::json{{"b", 2}, {"d", "# // /* kept */"}}));
}

TEST(Json, TrailingCommasAreAcceptedAtEveryDepth) {
  const auto node = relaxed(R"({"a": [1, 2, ], "b": {"c": [{"d": 1,}, ],}, /* x */ // y
  })");
  EXPECT_EQ(node, nlohmann::json::parse(R"({"a": [1, 2], "b": {"c": [{"d": 1}]}})"));
  EXPECT_NE(refusal("{,}").find("not valid JSON"), std::string::npos);
  EXPECT_NE(refusal("[1,,]").find("not valid JSON"), std::string::npos);
  const auto strict = [] { parse_json("[1,]", "ds.json", JsonDialect::strict); };
  EXPECT_EQ(test::error_of(strict).code(), Errc::config);
}

TEST(Json, NumbersLike1e9AreIntegers) {
  const auto node = relaxed(R"({"a": 1e9, "b": 8.0, "c": 5e-1})");
  const JsonObject object(node, "ds.json");
  EXPECT_EQ(object.integer("a", 0, 0, 2000000000), 1000000000);
  EXPECT_EQ(object.integer("b", 0, 0, 10), 8);
  EXPECT_EQ(test::error_of([&] { object.integer("c", 0, 0, 10); }).code(), Errc::config);
}

TEST(Json, IntegersBeyond64BitsAreRefused) {
  for (const char* n : {"9223372036854775808", "9223372036854775808.0", "18446744073709551615", "1e300"}) {
    const auto document = parse_json(std::string("{\"n\": ") + n + "}", "f", JsonDialect::strict);
    EXPECT_THROW(JsonObject(document, "f").integer("n", 0, 0, std::numeric_limits<std::int64_t>::max()),
                 Error)
        << n;
  }
  const auto largest = parse_json("{\"n\": 9223372036854775807}", "f", JsonDialect::strict);
  EXPECT_EQ(JsonObject(largest, "f").integer("n", 0, 0, std::numeric_limits<std::int64_t>::max()),
            std::numeric_limits<std::int64_t>::max());
}

TEST(Json, ADuplicateKeyIsRefusedWithBothLines) {
  EXPECT_EQ(refusal("{\n  \"stage\": 1,\n\n  \"stage\": 2\n}"),
            "ds.json: line 4: key 'stage' is given twice in one object, first on line 2; remove one");
  // Comments, texts and other objects do not shift the lines.
  EXPECT_EQ(refusal("{ // \"x\": 1\n \"text\": \"a\\\"b: \\\\\",\n \"x\": {\"y\": 1}, \"z\": {\"y\": 2},\n"
                    " \"list\": [\"x\", {\"x\": 1}],\n /* \"x\": 2,\n */ \"x\": 3}"),
            "ds.json: line 6: key 'x' is given twice in one object, first on line 3; remove one");
  EXPECT_EQ(refusal("{\"a\": {\"b\": [{\"c\": 1,\n\"c\": 2}]}}"),
            "ds.json: line 2: key 'c' is given twice in one object, first on line 1; remove one");
  relaxed(R"({"a": {"b": 1}, "c": {"b": 1}, "d": [{"b": 1}, {"b": 1}]})");
}

}  // namespace
}  // namespace rz
