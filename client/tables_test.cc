#include "client/tables.h"

#include <gtest/gtest.h>

namespace quern::client {
namespace {

TEST(TablesTest, ColumnsAreAlignedAndLinesHaveNoTrailingSpaces) {
  Table table({{"FILE"}, {"SIZE", kRight}, {"NOTE"}});
  table.AddRow({"model.safetensors", "7 B", ""});
  table.AddRow({"a", "1.5 GiB", "x"});
  EXPECT_EQ(table.ToString(),
            "FILE                  SIZE  NOTE\n"
            "model.safetensors      7 B\n"
            "a                  1.5 GiB  x\n");
}

TEST(TablesTest, MissingCellsAreEmpty) {
  Table table({{"A"}, {"B"}});
  table.AddRow({"1"});
  EXPECT_EQ(table.ToString(2), "  A  B\n  1\n");
}

TEST(TablesTest, ControlCharactersCannotBreakALine) {
  Table table({{"A"}});
  table.AddRow({"one\ntwo\x1b[31m"});
  EXPECT_EQ(table.ToString(), "A\none two [31m\n");
}

TEST(TablesTest, WidthIsCountedInCodePoints) {
  Table table({{"A"}, {"B"}});
  table.AddRow({"\xC3\xA9t\xC3\xA9", "x"});
  table.AddRow({"abc", "y"});
  EXPECT_EQ(table.ToString(),
            "A    B\n"
            "\xC3\xA9t\xC3\xA9  x\n"
            "abc  y\n");
}

}  // namespace
}  // namespace quern::client
