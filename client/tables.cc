#include "client/tables.h"

#include <algorithm>
#include <utility>

#include "base/text_check.h"

namespace quern::client {
namespace {

size_t Width(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

}  // namespace

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  for (std::string& cell : cells) cell = OneLine(cell, cell.size());
  rows_.push_back(std::move(cells));
}

std::string Table::ToString(int indent) const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(Width(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }

  std::string text;
  const auto append_line = [&](const auto& cell_of) {
    std::string line(indent, ' ');
    for (size_t i = 0; i < columns_.size(); ++i) {
      const std::string& cell = cell_of(i);
      const std::string padding(widths[i] - Width(cell), ' ');
      if (i > 0) line += "  ";
      line += columns_[i].align == Align::kRight ? padding + cell : cell + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  append_line([&](size_t i) -> const std::string& { return columns_[i].title; });
  for (const auto& row : rows_) append_line([&](size_t i) -> const std::string& { return row[i]; });
  return text;
}

}  // namespace quern::client
