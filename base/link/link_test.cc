// Both ends of data connections in one process, over socket pairs and, for the dialer, a listening socket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/link/connection.h"
#include "base/link/dial.h"
#include "base/link/frame.h"
#include "base/link/ticket.h"
#include "base/link/tls_context.h"
#include "base/status_matchers.h"

namespace quern {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(30);
bool Always() { return true; }

std::string RandomBytes(uint64_t size, uint32_t seed) {
  std::string bytes(size, '\0');
  std::mt19937 random(seed);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::pair<UniqueFd, UniqueFd> SocketPair() {
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// An authority and the certificates it signs, as files.
class Authority {
 public:
  // `parent`: who signs it, if it does not do so itself.
  explicit Authority(const std::string& directory, Authority* parent = nullptr)
      : directory_(directory), key_(EVP_EC_gen("P-256"), EVP_PKEY_free) {
    certificate_ = parent == nullptr ? Make("authority", "", key_.get(), nullptr, key_.get())
                                     : Make("lower authority", "", key_.get(), parent->certificate_.get(), parent->key_.get());
    Save(JoinPath(directory_, "ca.pem"), [this](FILE* file) { PEM_write_X509(file, certificate_.get()); });
  }
  // For a name as "DNS:coordinator" or "IP:127.0.0.1".
  TlsFiles Issue(const std::string& name, const std::string& alternative) {
    const Key key(EVP_EC_gen("P-256"), EVP_PKEY_free);
    const Certificate certificate = Make(name, alternative, key.get(), certificate_.get(), key_.get());
    const TlsFiles files = {JoinPath(directory_, "ca.pem"), JoinPath(directory_, name + ".pem"), JoinPath(directory_, name + ".key")};
    Save(files.certificate, [&](FILE* file) { PEM_write_X509(file, certificate.get()); });
    Save(files.key, [&](FILE* file) { PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr); });
    return files;
  }

 private:
  using Key = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)>;
  using Certificate = std::unique_ptr<X509, void (*)(X509*)>;

  // Without an alternative name: of an authority.
  Certificate Make(const std::string& name, const std::string& alternative, EVP_PKEY* key, X509* issuer, EVP_PKEY* signer) {
    Certificate made(X509_new(), X509_free);
    X509_set_version(made.get(), 2);
    ASN1_INTEGER_set(X509_get_serialNumber(made.get()), ++serial_);
    X509_gmtime_adj(X509_getm_notBefore(made.get()), -3600);
    X509_gmtime_adj(X509_getm_notAfter(made.get()), 3600);
    X509_set_pubkey(made.get(), key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(name.c_str()),
                               -1, -1, 0);
    X509_set_issuer_name(made.get(), X509_get_subject_name(issuer != nullptr ? issuer : made.get()));
    const std::pair<int, std::string> extension =
        alternative.empty() ? std::pair(NID_basic_constraints, std::string("CA:TRUE")) : std::pair(NID_subject_alt_name, alternative);
    X509_EXTENSION* const made_extension = X509V3_EXT_conf_nid(nullptr, nullptr, extension.first, extension.second.c_str());
    X509_add_ext(made.get(), made_extension, -1);
    X509_EXTENSION_free(made_extension);
    X509_sign(made.get(), signer, EVP_sha256());
    return made;
  }
  static void Save(const std::string& path, const std::function<void(FILE*)>& write) {
    RemoveFile(path).IgnoreError();
    FILE* const file = fopen(path.c_str(), "w");
    fchmod(fileno(file), 0600);
    write(file);
    EXPECT_EQ(fclose(file), 0);
  }

  const std::string directory_;
  int serial_ = 0;
  Key key_;
  Certificate certificate_{nullptr, X509_free};
};

class LinkTest : public testing::Test {
 protected:
  struct Pair {
    std::unique_ptr<LinkConnection> client, server;
  };
  static Pair Plain(absl::Duration patience = kLinkPatience) {
    auto [one, other] = SocketPair();
    return {std::make_unique<LinkConnection>(std::move(one), patience), std::make_unique<LinkConnection>(std::move(other), patience)};
  }
  struct Handshake {
    absl::Status client, server;
  };
  static Handshake Shake(const Pair& pair, const TlsFiles& client, const TlsFiles& server, const std::string& host = "coordinator") {
    TlsContexts clients(client, TlsContexts::Side::kClient), servers(server, TlsContexts::Side::kServer);
    Handshake result;
    std::thread other([&] {
      const auto context = servers.Get();
      result.server = context.ok() ? pair.server->BeTlsServer(context->get(), kSoon) : context.status();
      // TLS 1.3: the client is done before the server has seen its certificate.
      if (!result.server.ok()) pair.server->Shutdown();
    });
    const auto context = clients.Get();
    result.client = context.ok() ? pair.client->BeTlsClient(context->get(), host, kSoon, Always) : context.status();
    if (!result.client.ok()) pair.client->Shutdown();
    other.join();
    return result;
  }
  Pair Tls() {
    Pair pair = Plain();
    const Handshake handshake = Shake(pair, authority_.Issue("worker", "DNS:worker"), authority_.Issue("server", "DNS:coordinator"));
    QUERN_EXPECT_OK(handshake.client);
    QUERN_EXPECT_OK(handshake.server);
    return pair;
  }

  // All of both at once, in pieces of many sizes.
  static void ExpectBothWays(const Pair& pair) {
    const std::string up = RandomBytes(6 * kMiB, 1), down = RandomBytes(9 * kMiB, 2);
    const auto write = [](LinkConnection& connection, const std::string& bytes) {
      std::mt19937 sizes(3);
      for (size_t at = 0; at < bytes.size();) {
        const size_t size = std::min<size_t>(sizes() % (sizes() % 2 == 0 ? 100 : 600'000) + 1, bytes.size() - at);
        QUERN_ASSERT_OK(connection.Write(bytes.data() + at, size));
        at += size;
      }
    };
    const auto read = [](LinkConnection& connection, const std::string& expected) {
      std::string bytes(expected.size(), '\0');
      std::mt19937 sizes(4);
      for (size_t at = 0; at < bytes.size();) {
        const size_t size = std::min<size_t>(sizes() % (sizes() % 2 == 0 ? 100 : 600'000) + 1, bytes.size() - at);
        ASSERT_THAT(connection.Read(bytes.data() + at, size), IsOkAndHolds(true));
        at += size;
      }
      EXPECT_EQ(Sha256Of(bytes), Sha256Of(expected));
    };
    std::vector<std::thread> threads;
    threads.emplace_back([&] { write(*pair.client, up); });
    threads.emplace_back([&] { write(*pair.server, down); });
    threads.emplace_back([&] { read(*pair.server, up); });
    read(*pair.client, down);
    for (std::thread& thread : threads) thread.join();
  }

  const TempDir directory_ = TempDir::Make("link").value();
  Authority authority_{directory_.path()};
};

TEST_F(LinkTest, BytesGoBothWaysAtOnce) { ExpectBothWays(Plain()); }

TEST_F(LinkTest, BytesGoBothWaysAtOnceByTls) { ExpectBothWays(Tls()); }

TEST_F(LinkTest, EndIsToldFromABreak) {
  for (const bool tls : {false, true}) {
    const Pair pair = tls ? Tls() : Plain();
    QUERN_ASSERT_OK(pair.server->Write("abc", 3));
    std::thread end([&] { pair.server->Finish(kSoon); });
    char bytes[8];
    EXPECT_THAT(pair.client->Await(kSoon), IsOkAndHolds(true));
    EXPECT_THAT(pair.client->Read(bytes, 2), IsOkAndHolds(true));
    EXPECT_THAT(pair.client->Read(bytes, 2), StatusIs(absl::StatusCode::kUnavailable)) << "one of two had come";
    EXPECT_THAT(pair.client->Read(bytes, 1), IsOkAndHolds(false));
    pair.client->Shutdown();
    end.join();
  }
}

TEST_F(LinkTest, LastWordArrivesAlthoughBytesCameThatNobodyRead) {
  for (const bool tls : {false, true}) {
    const Pair pair = tls ? Tls() : Plain();
    const std::string much = RandomBytes(100'000, 6);
    QUERN_ASSERT_OK(pair.client->Write(much.data(), much.size()));
    QUERN_ASSERT_OK(pair.server->Write("end", 3));
    std::thread end([&] {
      pair.server->Finish(kSoon);
      pair.server->Shutdown();
    });
    char bytes[3];
    EXPECT_THAT(pair.client->Read(bytes, 3), IsOkAndHolds(true));
    EXPECT_EQ(std::string(bytes, 3), "end");
    pair.client->Shutdown();
    end.join();
  }
}

TEST_F(LinkTest, ShutdownEndsWhatWaits) {
  for (const bool tls : {false, true}) {
    const Pair pair = tls ? Tls() : Plain();
    const std::string much(64 * kMiB, 'x');
    absl::Status written;
    std::thread writer([&] { written = pair.client->Write(much.data(), much.size()); });
    std::thread stopper([&] {
      char bytes[100];
      EXPECT_THAT(pair.server->Read(bytes, sizeof(bytes)), IsOkAndHolds(true));
      pair.client->Shutdown();
    });
    char byte;
    EXPECT_FALSE(pair.client->Read(&byte, 1).value_or(false));
    writer.join();
    stopper.join();
    EXPECT_THAT(written, StatusIs(absl::StatusCode::kUnavailable));
    EXPECT_THAT(pair.client->Write("x", 1), StatusIs(absl::StatusCode::kUnavailable)) << "and raises no signal";
  }
}

TEST_F(LinkTest, SilentPeerIsGivenUp) {
  const Pair pair = Plain(absl::Milliseconds(20));
  char byte;
  EXPECT_THAT(pair.client->Await(absl::ZeroDuration()), IsOkAndHolds(false));
  EXPECT_THAT(pair.client->Read(&byte, 1), StatusIs(absl::StatusCode::kDeadlineExceeded));
  const Pair patient = Plain();
  EXPECT_THAT(patient.client->Read(&byte, 1, absl::Milliseconds(20)), StatusIs(absl::StatusCode::kDeadlineExceeded));
  const std::string much(64 * kMiB, 'x');
  EXPECT_THAT(pair.client->Write(much.data(), much.size()), StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(pair.client->Write("end", 3), StatusIs(absl::StatusCode::kUnavailable)) << "it would be read as part of what was cut";
}

TEST_F(LinkTest, BothSidesProveWhoTheyAre) {
  const TempDir elsewhere = TempDir::Make("link").value();
  Authority foreign(elsewhere.path());
  const TlsFiles server = authority_.Issue("server", "DNS:coordinator,IP:127.0.0.1");
  const TlsFiles worker = authority_.Issue("worker", "DNS:worker");
  QUERN_EXPECT_OK(Shake(Plain(), worker, server).client);
  QUERN_EXPECT_OK(Shake(Plain(), worker, server, "127.0.0.1").client);
  for (const char* other : {"elsewhere", "127.0.0.2", "oordinator"}) {
    const Handshake handshake = Shake(Plain(), worker, server, other);
    EXPECT_THAT(handshake.client, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("mismatch"))) << other;
    EXPECT_THAT(handshake.server, StatusIs(absl::StatusCode::kUnavailable)) << other;
  }
  // Signed by somebody else: each side is refused by the other.
  TlsFiles impostor = foreign.Issue("server", "DNS:coordinator");
  EXPECT_THAT(Shake(Plain(), worker, impostor).client, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("certificate")));
  TlsFiles stranger = foreign.Issue("worker", "DNS:worker");
  stranger.authority = worker.authority;
  EXPECT_THAT(Shake(Plain(), stranger, server).server, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("certificate")));
}

TEST_F(LinkTest, AuthorityNeedNotBeTheHighest) {
  const TempDir below = TempDir::Make("link").value();
  Authority lower(below.path(), &authority_);
  const Handshake handshake = Shake(Plain(), lower.Issue("worker", "DNS:worker"), lower.Issue("server", "DNS:coordinator"));
  QUERN_EXPECT_OK(handshake.client);
  QUERN_EXPECT_OK(handshake.server);
}

TEST_F(LinkTest, WhatIsNoTlsIsRefused) {
  const Pair pair = Plain();
  TlsContexts servers(authority_.Issue("server", "DNS:coordinator"), TlsContexts::Side::kServer);
  QUERN_ASSERT_OK_AND_ASSIGN(const auto context, servers.Get());
  const std::string nonsense(500, 'G');
  QUERN_ASSERT_OK(pair.client->Write(nonsense.data(), nonsense.size()));
  EXPECT_THAT(pair.server->BeTlsServer(context.get(), kSoon), StatusIs(absl::StatusCode::kUnavailable));
  const Pair silent = Plain();
  EXPECT_THAT(silent.server->BeTlsServer(context.get(), absl::Milliseconds(10)), StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(silent.client->BeTlsClient(context.get(), "x", kSoon, [] { return false; }), StatusIs(absl::StatusCode::kCancelled));
}

TEST_F(LinkTest, NewCertificatesAreUsedAndUnusableOnesAreNot) {
  const TlsFiles files = authority_.Issue("server", "DNS:coordinator");
  TlsContexts contexts(files, TlsContexts::Side::kServer);
  QUERN_ASSERT_OK_AND_ASSIGN(const auto first, contexts.Get());
  EXPECT_THAT(contexts.Get(), IsOkAndHolds(first));
  authority_.Issue("server", "DNS:coordinator");
  QUERN_ASSERT_OK_AND_ASSIGN(const auto second, contexts.Get());
  EXPECT_NE(second, first);
  QUERN_ASSERT_OK(WriteFileDurably(files.certificate, "no certificate"));
  EXPECT_THAT(contexts.Get(), IsOkAndHolds(second));
  EXPECT_THAT(TlsContexts(files, TlsContexts::Side::kServer).Get().status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(files.certificate)));
}

TEST_F(LinkTest, FramesComeAsTheyWere) {
  const Pair pair = Plain();
  const LinkFrame frame = {.kind = LinkFrame::Kind::kRange, .size = 0, .range = 7, .offset = UINT64_MAX, .length = 3, .xxh3 = 9};
  std::string bytes;
  AppendFrame(frame, "/a", &bytes);
  EXPECT_EQ(bytes.size(), kFrameHeadSize + 2);
  QUERN_ASSERT_OK(pair.client->Write(bytes.data(), bytes.size()));
  QUERN_ASSERT_OK_AND_ASSIGN(const auto read, ReadFrameHead(*pair.server));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, frame.kind);
  EXPECT_EQ(read->size, 2);
  EXPECT_EQ(read->range, frame.range);
  EXPECT_EQ(read->offset, frame.offset);
  EXPECT_EQ(read->length, frame.length);
  EXPECT_EQ(read->xxh3, frame.xxh3);
  char payload[2];
  QUERN_ASSERT_OK(ReadPayload(*pair.server, payload, 2));
  EXPECT_EQ(std::string(payload, 2), "/a");
  pair.client->Shutdown();
  QUERN_ASSERT_OK_AND_ASSIGN(const auto end, ReadFrameHead(*pair.server));
  EXPECT_FALSE(end.has_value());
}

TEST_F(LinkTest, FramesOfNoKindAndOfTooManyBytesAreRefused) {
  for (const LinkFrame& frame : {LinkFrame{.kind = static_cast<LinkFrame::Kind>(0)}, LinkFrame{.kind = static_cast<LinkFrame::Kind>(7)},
                                 LinkFrame{.kind = LinkFrame::Kind::kChunk, .size = kLargestChunk + 1},
                                 LinkFrame{.kind = LinkFrame::Kind::kEnd, .size = UINT32_MAX}}) {
    const Pair pair = Plain();
    std::string bytes;
    AppendFrameHead(frame, &bytes);
    QUERN_ASSERT_OK(pair.client->Write(bytes.data(), bytes.size()));
    EXPECT_THAT(ReadFrameHead(*pair.server).status(), StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

TEST_F(LinkTest, GreetingIsToldFromOtherOpenings) {
  const std::string ticket = NewTicket();
  EXPECT_EQ(ticket.size(), kTicketSize);
  EXPECT_NE(ticket, NewTicket());
  const std::string greeting = Greeting(ticket);
  ASSERT_EQ(greeting.size(), kGreetingSize);
  EXPECT_EQ(TicketNameIn(greeting), NameOfTicket(ticket));
  EXPECT_THAT(greeting, testing::Not(HasSubstr(ticket.substr(0, 16))));
  for (size_t size = 1; size < greeting.size(); ++size) EXPECT_EQ(JudgeOpening(greeting.substr(0, size)), Opening::kTooShort) << size;
  EXPECT_EQ(JudgeOpening(greeting), Opening::kGreeting);
  for (const std::string& other : {std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), std::string("\x16\x03\x01"), std::string("q\0", 2),
                                   std::string("quern-data/2 "), std::string("Q")}) {
    EXPECT_EQ(JudgeOpening(other), Opening::kOther) << other;
  }
}

TEST_F(LinkTest, DialerShowsItsTicket) {
  const std::string path = JoinPath(directory_.path(), "s");
  LinkDialer dialer("unix:" + path, {});
  const std::string ticket = NewTicket();
  EXPECT_THAT(dialer.Dial(ticket, kSoon, Always).status(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr(path)));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 4), 0);
  QUERN_ASSERT_OK_AND_ASSIGN(const auto client, dialer.Dial(ticket, kSoon, Always));
  LinkConnection server(UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  std::string opening(kGreetingSize + kTicketSize, '\0');
  EXPECT_THAT(server.Read(opening.data(), opening.size()), IsOkAndHolds(true));
  EXPECT_EQ(opening, Greeting(ticket) + ticket);
}

}  // namespace
}  // namespace quern
