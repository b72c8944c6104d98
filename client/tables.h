// Plain-text tables with aligned columns.
#ifndef QUERN_CLIENT_TABLES_H_
#define QUERN_CLIENT_TABLES_H_

#include <string>
#include <vector>

namespace quern::client {

class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // One cell a column. Line breaks and other FindControl characters of a cell are shown as spaces.
  void AddRow(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }

  // A line of titles, then a line a row; columns two spaces apart, no spaces at line ends. Width is counted in code points of UTF-8.
  // Every line begins with `indent` spaces.
  std::string ToString(int indent = 0) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

inline constexpr Table::Align kRight = Table::Align::kRight;

}  // namespace quern::client

#endif  // QUERN_CLIENT_TABLES_H_
