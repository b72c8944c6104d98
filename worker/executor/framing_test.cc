#include "worker/executor/framing.h"

#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "base/file.h"
#include "base/status_matchers.h"
#include "quern/v1/executor.pb.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;

class FramingTest : public ::testing::Test {
 protected:
  FramingTest() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    near_ = UniqueFd(ends[0]);
    far_ = UniqueFd(ends[1]);
  }
  void SendRaw(const std::string& bytes) { ASSERT_EQ(write(near_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size())); }

  UniqueFd near_, far_;
  quern::v1::ExecutorEvent event_;
};

TEST_F(FramingTest, MessagesArriveInOrder) {
  quern::v1::ExecutorEvent sent;
  for (uint32_t i = 0; i < 3; ++i) {
    sent.mutable_status()->mutable_id()->set_task(i);
    QUERN_ASSERT_OK(WriteFrame(near_.get(), sent));
  }
  for (uint32_t i = 0; i < 3; ++i) {
    ASSERT_THAT(ReadFrame(far_.get(), &event_), IsOkAndHolds(true));
    EXPECT_EQ(event_.status().id().task(), i);
  }
}

TEST_F(FramingTest, SizeIsLittleEndian) {
  quern::v1::ExecutorEvent sent;
  sent.mutable_status()->mutable_failure()->set_message(std::string(300, 'x'));
  const size_t size = sent.ByteSizeLong();
  QUERN_ASSERT_OK(WriteFrame(near_.get(), sent));
  unsigned char header[4];
  ASSERT_EQ(read(far_.get(), header, 4), 4);
  EXPECT_EQ(header[0] | header[1] << 8 | header[2] << 16 | header[3] << 24, static_cast<int>(size));
}

TEST_F(FramingTest, EmptyMessageIsAMessage) {
  QUERN_ASSERT_OK(WriteFrame(near_.get(), quern::v1::ExecutorEvent()));
  EXPECT_THAT(ReadFrame(far_.get(), &event_), IsOkAndHolds(true));
}

TEST_F(FramingTest, MessageLargerThanTheSocketBufferArrivesWhole) {
  quern::v1::ExecutorCommand command;
  command.mutable_start()->mutable_spec()->mutable_write_shard()->set_header(std::string(5 << 20, 'h'));
  std::thread writer([&] { QUERN_EXPECT_OK(WriteFrame(near_.get(), command)); });
  quern::v1::ExecutorCommand received;
  EXPECT_THAT(ReadFrame(far_.get(), &received), IsOkAndHolds(true));
  writer.join();
  EXPECT_EQ(received.start().spec().write_shard().header().size(), size_t{5} << 20);
}

TEST_F(FramingTest, CloseBetweenMessagesIsTheEnd) {
  near_.Reset();
  EXPECT_THAT(ReadFrame(far_.get(), &event_), IsOkAndHolds(false));
}

TEST_F(FramingTest, CloseInsideTheSizeIsDataLoss) {
  SendRaw(std::string("\x05\x00", 2));
  near_.Reset();
  EXPECT_THAT(ReadFrame(far_.get(), &event_), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("inside a message's size")));
}

TEST_F(FramingTest, CloseInsideTheBodyIsDataLoss) {
  SendRaw(std::string("\x05\x00\x00\x00\x0a", 5));
  near_.Reset();
  EXPECT_THAT(ReadFrame(far_.get(), &event_), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("after 1 of 5 bytes")));
}

TEST_F(FramingTest, OversizedAnnouncementIsRefusedWithoutReading) {
  SendRaw(std::string("\x01\x00\x00\x04", 4));  // 64 MiB + 1
  EXPECT_THAT(ReadFrame(far_.get(), &event_), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("67108865")));
}

TEST_F(FramingTest, OversizedMessageIsNotSent) {
  quern::v1::ExecutorCommand command;
  command.mutable_start()->mutable_spec()->mutable_write_shard()->set_header(std::string(kMaxFrameSize, 'h'));
  EXPECT_THAT(WriteFrame(near_.get(), command), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("--max-shard-size")));
  near_.Reset();
  EXPECT_THAT(ReadFrame(far_.get(), &event_), IsOkAndHolds(false));
}

TEST_F(FramingTest, BytesThatAreNoMessageAreDataLoss) {
  SendRaw(std::string("\x02\x00\x00\x00\x0a\x7f", 6));  // a field of 127 bytes that are not there
  EXPECT_THAT(ReadFrame(far_.get(), &event_), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("no quern.v1.ExecutorEvent")));
}

TEST_F(FramingTest, WritingToAPeerThatIsGoneIsUnavailable) {
  far_.Reset();
  EXPECT_THAT(WriteFrame(near_.get(), event_), StatusIs(absl::StatusCode::kUnavailable));
}

TEST_F(FramingTest, WritingToAPeerThatDoesNotReadEndsWithTheSendTimeout) {
  const timeval timeout = {0, 1000};
  ASSERT_EQ(setsockopt(near_.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)), 0);
  quern::v1::ExecutorCommand command;
  command.mutable_start()->mutable_spec()->mutable_write_shard()->set_header(std::string(8 << 20, 'h'));
  EXPECT_THAT(WriteFrame(near_.get(), command), StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("does not read")));
}

}  // namespace
}  // namespace quern::worker
