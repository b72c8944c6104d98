#include "base/path_map.h"

#include "base/status_matchers.h"

namespace quern {
namespace {

using testing::HasSubstr;

TEST(PathMapTest, LongestPrefixOfWholeComponentsIsReplaced) {
  PathMap map;
  QUERN_ASSERT_OK(map.Add("/mnt/a=/data"));
  QUERN_ASSERT_OK(map.Add("/mnt/a/models/=/fast/"));
  EXPECT_EQ(map.Apply("/mnt/a/x"), "/data/x");
  EXPECT_EQ(map.Apply("/mnt/a"), "/data");
  EXPECT_EQ(map.Apply("/mnt/a/models/m/x"), "/fast/m/x");
  EXPECT_EQ(map.Apply("/mnt/a/models2/x"), "/data/models2/x");
  EXPECT_EQ(map.Apply("/mnt/ab/x"), "/mnt/ab/x");
  EXPECT_EQ(map.Apply("/other"), "/other");
}

TEST(PathMapTest, RootMayStandOnBothSides) {
  PathMap below;
  QUERN_ASSERT_OK(below.Add("/=/nfs/host"));
  EXPECT_EQ(below.Apply("/models/x"), "/nfs/host/models/x");
  PathMap above;
  QUERN_ASSERT_OK(above.Add("/nfs/host=/"));
  EXPECT_EQ(above.Apply("/nfs/host/models/x"), "/models/x");
  EXPECT_EQ(above.Apply("/nfs/host"), "/");
}

TEST(PathMapTest, TheRootIsWhatTheMappingNames) {
  PathMap map;
  QUERN_ASSERT_OK(map.Add("/mnt/a=/data/"));
  QUERN_ASSERT_OK(map.Add("/nfs=/"));
  const auto root = [&map](absl::string_view path) {
    std::string root;
    map.Apply(path, &root);
    return root;
  };
  EXPECT_EQ(root("/mnt/a/x"), "/data");
  EXPECT_EQ(root("/nfs/x"), "/");
  EXPECT_EQ(root("/other/x"), "/");
}

TEST(PathMapTest, EqualsSignsMayStandInPaths) {
  PathMap map;
  QUERN_ASSERT_OK(map.Add("/mnt/run=3/a=/data"));
  EXPECT_EQ(map.Apply("/mnt/run=3/a/x"), "/data/x");
}

TEST(PathMapTest, WhatIsNoMappingIsRefused) {
  PathMap map;
  for (const char* text : {"", "/a", "a=/b", "/a=b", "=", "/a="}) {
    EXPECT_THAT(map.Add(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("/mnt/a=/mnt/b"))) << text;
  }
  EXPECT_THAT(map.Add("/a=/b=/c"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not clear")));
  for (const char* text : {"/a/../b=/c", "/a=/b/..", "/a/./b=/c", "/a=/b/.", "//a=/c", "/a//b=/c", "/a=/b//c", "/..=/a"}) {
    EXPECT_THAT(map.Add(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fits nothing"))) << text;
  }
  QUERN_ASSERT_OK(map.Add("/a=/b"));
  EXPECT_THAT(map.Add("/a/=/c"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("twice")));
}

}  // namespace
}  // namespace quern
